"""``stagetap store``: a Mooncake store on this machine."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from stagetap.cli.arguments import JsonOption
from stagetap.cli.output import human_bytes, notes, print_json, results
from stagetap.errors import Refused, StoreError

if TYPE_CHECKING:
    from stagetap.stores.mooncake_processes import Process
    from stagetap.stores.mooncake_uri import MooncakeOptions

app = typer.Typer(no_args_is_help=True, help="A Mooncake store on this machine.")

_LOOK_SECONDS = 0.2
_READY_SECONDS = 20.0


@app.callback()
def _root() -> None:
    """A Mooncake store on this machine."""


@app.command("up")
def up_command(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The master's port; 0 takes a free one.")
    ] = 50051,
    host: Annotated[
        str, typer.Option("--host", help="The address to listen on, at which others reach it.")
    ] = "127.0.0.1",
    lend: Annotated[
        str | None,
        typer.Option(
            "--lend",
            metavar="SIZE",
            help="Lend this much memory to the store from a process of its own, such as 4GiB: "
            "samples then outlive the engine. Without it each worker of the engine lends its own.",
        ),
    ] = None,
    lease_ms: Annotated[
        int | None,
        typer.Option("--lease-ms", min=1, help="How long a reader's lease lasts; default 10000."),
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="Keep what Mooncake's programs write here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a mooncake_master until Ctrl-C or SIGTERM, and print the address of its store.

    That ends it well: exit code 0. When one of its programs ends by itself, all of them are ended:
    exit code 1.
    """
    from stagetap.stores.mooncake_package import load_mooncake, tell_library
    from stagetap.stores.mooncake_processes import Master, MemoryHost
    from stagetap.stores.mooncake_uri import MooncakeOptions

    if host in ("0.0.0.0", "::", "[::]"):
        raise Refused("--host: give the one address of this machine that others use")
    lent_bytes = _lent(lend)
    _check_log(log)
    signal.signal(signal.SIGTERM, _interrupt)
    tell_library(5.0, host)
    load_mooncake()  # Says which library is missing; the programs would only fail.
    with ExitStack() as running:
        try:
            master = running.enter_context(Master(host, port, lease_ms, log))
            processes: list[Process] = [master]
            options = MooncakeOptions(master=master.address)
            if lent_bytes:
                processes.append(
                    running.enter_context(MemoryHost(master.address, lent_bytes, host, log=log))
                )
                options = MooncakeOptions(master=master.address, global_segment_size=0)
                _wait_for_memory(options, processes)
            uri = _with_place_for_run(options)
            if as_json:
                print_json(
                    {
                        "uri": uri,
                        "master": master.address,
                        "metrics": master.metrics,
                        "lent_bytes": lent_bytes,
                        "pids": {each.name: each.pid for each in processes},
                    }
                )
            else:
                _show(results(), uri, master.metrics, lent_bytes)
            _watch(processes)
        except KeyboardInterrupt:
            notes().print("stopping; what the store held is gone")


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _lent(text: str | None) -> int:
    from stagetap.stores.mooncake_memory import check_fits
    from stagetap.stores.mooncake_uri import parse_lent

    if text is None:
        return 0
    try:
        size = parse_lent(text)
    except ValueError as error:
        raise Refused(f"--lend: {error}") from None
    if not size:
        raise Refused("--lend: a size of nothing; leave it out")
    check_fits(f"--lend {text}", size)
    return size


def _check_log(log: Path | None) -> None:
    if log is None:
        return
    if log.is_dir():
        raise Refused(f"--log {log}: that is a directory; name a file in it")
    if not log.absolute().parent.is_dir():
        raise Refused(f"--log {log}: there is no directory {log.parent}; make it first")


def _with_place_for_run(options: MooncakeOptions) -> str:
    """The store's address, with RUN where the name of a run goes."""
    from msgspec.structs import replace

    from stagetap.stores.mooncake_uri import format_uri

    return format_uri(replace(options, run="RUN"))


def _wait_for_memory(options: Any, processes: list[Process]) -> None:
    """Until an object can be stored, read and removed. Raises StoreError."""
    from stagetap.stores.mooncake_client import open_client

    deadline = time.monotonic() + _READY_SECONDS
    while True:
        _check(processes)
        try:
            open_client(options, "writer").close()
        except StoreError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS)
        else:
            return


def _watch(processes: list[Process]) -> None:
    """Look after the programs until one ends. Raises StoreError then."""
    while True:
        _check(processes)
        time.sleep(_LOOK_SECONDS)


def _check(processes: list[Process]) -> None:
    for process in processes:
        if process.has_ended():
            raise StoreError(f"{process.name} ended: {process.last_words()}")


def _show(console: Console, uri: str, metrics: str, lent_bytes: int) -> None:
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    facts.add_row("store", uri)
    facts.add_row(
        "memory", human_bytes(lent_bytes) if lent_bytes else "lent by the engine's workers"
    )
    facts.add_row("metrics", metrics)
    facts.add_row("", "put a name for RUN; Ctrl-C stops the store and drops what it holds")
    console.print(facts)
    sys.stdout.flush()
