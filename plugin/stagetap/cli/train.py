"""``stagetap train``: speculators' own trainer, with StageTap's datasets and drafts known to it."""

from __future__ import annotations

import typer

from stagetap.cli.output import results
from stagetap.errors import Refused

_BACKEND, _STORE = "--hidden-states-backend", "--stagetap-store"


def train_command(context: typer.Context) -> None:
    """Train a draft with speculators, on what StageTap captured.

    All arguments are those of `speculators train`, which --help lists. StageTap adds the backend
    `--hidden-states-backend stagetap` with its --stagetap-... flags, and the type `k3_dspark`.
    """
    from stagetap.training.register import register

    _check_backend(context.args)
    register()
    from speculators.cli import app

    from stagetap.training.cpu import use_cpu_without_accelerator
    from stagetap.training.summary import taken_lines

    use_cpu_without_accelerator()
    try:
        app(["train", *context.args], prog_name="stagetap")
    finally:
        for line in taken_lines():
            results().print(line)


def _check_backend(arguments: list[str]) -> None:
    """A dataset that no backend reads would be passed over in silence."""
    given = {argument.partition("=")[0] for argument in arguments}
    if _STORE in given and not given & {_BACKEND, "--config"}:
        raise Refused(f"{_STORE} is read by {_BACKEND} stagetap alone: say that as well")
