"""``stagetap train``: speculators' own trainer, with StageTap's datasets and drafts known to it."""

from __future__ import annotations

import typer
from safetensors import SafetensorError

from stagetap.cli.output import results
from stagetap.errors import Refused, StoreError
from stagetap.wording import one_line, shortened

_BACKEND, _STORE = "--hidden-states-backend", "--stagetap-store"
_SAVE_PATH = "--save-path"

_CANNOT_WRITE = ("No space left on device", "Disk quota exceeded", "inline_container")
"""In what Python, safetensors and torch say when a file cannot be written; the last is the place in
torch's sources, all that it says."""


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
    except (OSError, RuntimeError, SafetensorError) as error:
        if not any(said in str(error) for said in _CANNOT_WRITE):
            raise
        raise StoreError(
            f"a checkpoint cannot be written below {_save_path(context.args)} "
            f"({shortened(one_line(error), 200)}): free some space, remove the newest folder "
            "there, which is not whole, and start again: training goes on with the one before it"
        ) from error
    finally:
        for line in taken_lines():
            results().print(line)


def _save_path(arguments: list[str]) -> str:
    """What the arguments say, as far as they say it here and not in a file."""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == _SAVE_PATH:
            return value if equals else next(iter(arguments[position + 1 :]), _SAVE_PATH)
    return _SAVE_PATH


def _check_backend(arguments: list[str]) -> None:
    """A dataset that no backend reads would be passed over in silence."""
    given = {argument.partition("=")[0] for argument in arguments}
    if _STORE in given and not given & {_BACKEND, "--config"}:
        raise Refused(f"{_STORE} is read by {_BACKEND} stagetap alone: say that as well")
