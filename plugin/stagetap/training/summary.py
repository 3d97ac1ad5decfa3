"""Lines for the end of ``stagetap train``: what the trainer's own log would bury."""

from __future__ import annotations

_lines: list[str] = []


def say_at_the_end(line: str) -> None:
    """Keep a line of this process's training run until it ends."""
    _lines.append(line)


def taken_lines() -> list[str]:
    """What was kept, once."""
    lines, _lines[:] = list(_lines), []
    return lines
