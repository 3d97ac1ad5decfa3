"""Whether speculators' trainer would take a draft and a command line, before either is started."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from typing import Any

from stagetap.findings import Finding
from stagetap.wording import one_line, shortened

_CHECK = "draft and trainer"


def check_training(
    where: str, draft: Mapping[str, Any], command: Sequence[str]
) -> Iterator[Finding]:
    """The draft by the class that is trained, the arguments by the trainer's own parser.

    Args:
        where: what to call the draft in a message.
        draft: its ``config.json``.
        command: ``stagetap train`` and its arguments.
    """
    if not _is_installed():
        yield Finding(_CHECK, "not told: speculators is not installed here")
        return
    if wrong := [*check_built(where, draft)]:
        yield from wrong
    elif refused := _refused_arguments(command[2:]):
        cure = "`stagetap train --help` has those of trainer.extra-args that it takes"
        yield Finding(_CHECK, f"stagetap train: {refused}", cure)
    else:
        yield Finding(_CHECK, "speculators takes the draft and the arguments of stagetap train")


def check_built(where: str, draft: Mapping[str, Any]) -> Iterator[Finding]:
    """What the class that is trained refuses of a draft; nothing without speculators to ask.

    Arguments as :func:`check_training`.
    """
    if _is_installed() and (refused := _refused_draft(draft)):
        yield Finding(_CHECK, f"{where}: {refused}", "change that in the draft's config.json")


def _is_installed() -> bool:
    return all(map(find_spec, ("hs_connectors", "speculators", "torch")))


def _refused_draft(draft: Mapping[str, Any]) -> str | None:
    from huggingface_hub.errors import StrictDataclassError

    from stagetap.drafts.k3_dspark.config import K3DSparkConfig

    try:
        K3DSparkConfig(**draft).check_complete()
    except (
        *(ArithmeticError, AttributeError, LookupError, TypeError, ValueError),
        StrictDataclassError,
    ) as error:  # transformers looks at few of the types
        return shortened(one_line(error), 300)
    return None


def _refused_arguments(arguments: Sequence[str]) -> str | None:
    from stagetap.training.register import register

    register()
    from speculators.train.config.resolution import build_parser

    said = io.StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(io.StringIO()):
            build_parser().parse_args(arguments)
    except SystemExit as ended:
        if not ended.code:
            return "the arguments ask for help"
        return shortened(said.getvalue().strip().splitlines()[-1].partition("error: ")[2], 300)
    return None
