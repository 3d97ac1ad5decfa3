"""Lines for the end of ``stagetap train``: what the trainer's own log would bury."""

from __future__ import annotations

from collections.abc import Callable

_lines: list[str | Callable[[], str | None]] = []


def say_at_the_end(line: str | Callable[[], str | None]) -> None:
    """Keep a line of this process's training run until it ends, or what tells it then, if any."""
    _lines.append(line)


def taken_lines() -> list[str]:
    """What was kept, once."""
    lines, _lines[:] = list(_lines), []
    told = [line if isinstance(line, str) else line() for line in lines]
    return [line for line in told if line is not None]
