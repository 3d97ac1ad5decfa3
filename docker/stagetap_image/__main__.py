"""``just image``, ``just pin-base``: build an image, pin the bases."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from stagetap.cli.output import print_json, results, table
from stagetap.errors import StageTapError
from stagetap_image.bases import read_bases, write_digest
from stagetap_image.build import ROOT, build_image, connect, docker_command, registry_digest
from stagetap_image.errors import BuildRefused

LOCK = ROOT / "docker" / "bases.lock"

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
LockOption = Annotated[Path, typer.Option("--lock", help="Another lock file.")]


@app.command("build")
def build_command(
    target: Annotated[str, typer.Argument(help="A table of bases.lock: cpu or cuda.")] = "cpu",
    tag: Annotated[str | None, typer.Option("--tag", help="Default: stagetap:TARGET.")] = None,
    network: Annotated[
        str | None,
        typer.Option("--network", help="Of the build's steps: host for a daemon without a bridge."),
    ] = None,
    lock: LockOption = LOCK,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the `docker build` command alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Build the image of TARGET, and report base, series and bytes added."""
    bases = read_bases(lock)
    if target not in bases:
        raise BuildRefused(f"{lock.name} has no {target}; there are {', '.join(bases)}")
    if only_print:
        command = docker_command(target, bases[target], tag or f"stagetap:{target}", network)
        results().print(shlex.join(command), soft_wrap=True)
        return
    built = build_image(
        connect(),
        target,
        bases[target],
        tag=tag or f"stagetap:{target}",
        network=network,
        log=lambda line: print(line, file=sys.stderr),
    )
    if as_json:
        print_json(vars(built))
        return
    rows = table("what", "found")
    for name, found in built.report().items():
        rows.add_row(name, found)
    results().print(rows)


@app.command("pin")
def pin_command(lock: LockOption = LOCK) -> None:
    """Fill in the digest of every base whose registry answers; exit code 1 when one does not."""
    client = connect()
    silent = False
    for target, base in read_bases(lock).items():
        try:
            digest = registry_digest(client, base)
        except BuildRefused as error:
            silent = True
            print(f"{target}: {error}; it stays {base.pinned}", file=sys.stderr)
            continue
        write_digest(lock, target, digest)
        results().print(f"{target}: {base.name} is {digest}", soft_wrap=True)
    if silent:
        raise typer.Exit(1)


def main() -> None:
    """What ends a build on purpose is one line on stderr, and exit code 1."""
    try:
        app(prog_name="image")
    except (BuildRefused, StageTapError) as error:
        print(f"image: refused: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
