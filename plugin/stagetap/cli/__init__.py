"""The ``stagetap`` command."""

from __future__ import annotations

import sys

import typer

from stagetap.cli import patch
from stagetap.errors import Refused

app = typer.Typer(no_args_is_help=True, add_completion=False)
app.add_typer(patch.app, name="patch")


@app.callback()
def _root() -> None:
    """Exact hidden states out of pipeline-parallel vLLM."""


def main() -> None:
    """Run the command; a refusal is one line on stderr and exit code 2."""
    try:
        app()
    except Refused as refused:
        print(f"stagetap: refused: {refused}", file=sys.stderr)
        sys.exit(2)
