"""The ``stagetap`` command. One file a command; torch and vLLM load inside those that need them."""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from stagetap.cli import patch, store
from stagetap.cli.capture import capture_command
from stagetap.cli.demo import demo_command
from stagetap.cli.demo_online import demo_online_command
from stagetap.cli.demo_train import demo_train_command
from stagetap.cli.doctor import doctor_command
from stagetap.cli.equivalence import equivalence_command
from stagetap.cli.inspect import inspect_command
from stagetap.cli.packages import missing_package
from stagetap.cli.plan import plan_command
from stagetap.cli.rows import rows_command
from stagetap.cli.serve import serve_command
from stagetap.cli.stdout import named_stdout
from stagetap.cli.train import train_command
from stagetap.cli.train_prompts import train_prompts_command
from stagetap.cli.verify import verify_command
from stagetap.errors import Refused, StageTapError

DEBUG_ENV = "STAGETAP_DEBUG"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("capture")(capture_command)
app.command("inspect")(inspect_command)
app.command("verify")(verify_command)
app.command("equivalence")(equivalence_command)
app.command("serve", context_settings={"allow_extra_args": True})(serve_command)
app.command("rows")(rows_command)
app.command(
    "train",
    context_settings={
        "allow_extra_args": True,
        "allow_interspersed_args": False,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
)(train_command)
app.command("train-prompts")(train_prompts_command)
app.command("plan")(plan_command)
app.command("doctor")(doctor_command)
app.command("demo")(demo_command)
app.command("demo-online")(demo_online_command)
app.command("demo-train")(demo_train_command)
app.add_typer(patch.app, name="patch")
app.add_typer(store.app, name="store")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"stagetap {version('stagetap')}")
        raise typer.Exit()


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Exact hidden states out of pipeline-parallel vLLM."""


def main() -> None:
    """Run the command.

    What StageTap raises on purpose, and a package that is not installed, is one line on stderr:
    exit code 2 for a refusal, 1 for any other error. ``STAGETAP_DEBUG=1`` shows the traceback.
    """
    try:
        with named_stdout():
            app(prog_name="stagetap")
    except StageTapError as error:
        if os.environ.get(DEBUG_ENV) == "1":
            raise
        refused = isinstance(error, Refused)
        kind = "refused" if refused else "error"
        print(f"stagetap: {kind}: {' '.join(str(error).splitlines())}", file=sys.stderr)
        sys.exit(2 if refused else 1)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if os.environ.get(DEBUG_ENV) == "1" or package in ("", "stagetap"):
            raise
        print(f"stagetap: refused: {missing_package(package)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("stagetap: interrupted", file=sys.stderr)
        sys.exit(130)
