"""Where commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, TextIO

from rich.console import Console
from rich.table import Column, Table

from stagetap.cli.stdout import open_stdout

_FILE_COLUMNS = 160
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def results(stream: TextIO | None = None) -> Console:
    """A console for what a command was asked for: stdout, unless ``stream`` stands for it.

    A file is no terminal of 80 columns: tables that go to one may be wider.
    """
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS
    return console


def notes() -> Console:
    """A console for progress and remarks: stderr."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def print_json(document: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """One object on one line of stdout, with what JSON cannot say (infinity, NaN) as null."""
    line = json.dumps(_without_non_finite(document), ensure_ascii=False)
    print(line, file=stream or sys.stdout, flush=True)


@contextmanager
def stdout_kept_clean() -> Iterator[TextIO]:
    """While an engine runs, whatever it and its children write to stdout goes to stderr.

    Yields the real stdout, for the command's own result.
    """
    sys.stdout.flush()
    copy = os.dup(1)
    kept = open_stdout(copy, closefd=False)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield kept
        kept.flush()
    finally:
        os.dup2(copy, 1)
        kept.close()
        os.close(copy)


@contextmanager
def activity() -> Iterator[Callable[[str], None]]:
    """A function to say what is going on, on stderr: a spinner, or lines where that is a file."""
    console = notes()
    if not console.is_terminal:
        yield console.print
        return
    with console.status("") as status:
        yield status.update


def human_bytes(count: float) -> str:
    """``1.5 GiB``."""
    if count < 1024:
        return f"{count:.0f} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1024
        if size < 1024 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}"


def table(*headers: str, title: str | None = None) -> Table:
    """A table whose long cells are folded, never cut: a path or a digest is there to be used."""
    return Table(*(Column(header, overflow="fold") for header in headers), title=title)


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {str(key): _without_non_finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(each) for each in value]
    return value
