"""Words of messages: values, numbers and causes, each within one line."""

from __future__ import annotations

import unicodedata
from decimal import Decimal
from typing import Any

_SHOWN_CHARACTERS = 80


def shown(value: Any) -> str:
    """A value as it would be written, cut in its middle where it is long."""
    try:
        text = repr(value)
    except (
        RecursionError,
        ValueError,
    ):  # deeper than Python follows, or more digits than it prints
        text = f"{type(value).__name__} too large to show"
    return shortened(text)


def shortened(text: str, characters: int = _SHOWN_CHARACTERS) -> str:
    """Text of one line, of which the middle is left out where it is longer than this."""
    line = " ".join(_printable(text).split())
    if len(line) <= characters:
        return line
    half = (characters - 3) // 2
    return f"{line[:half]}...{line[-half:]}"


def one_line(error: BaseException) -> str:
    """What an error says, its lines joined; its name where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


def plain(number: float) -> str:
    """``120``, ``0.5``, ``1234567``: never with an exponent, which no option takes."""
    return f"{Decimal(repr(number)):f}".removesuffix(".0")


def counted(number: int, noun: str) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of what moves a cursor, turns the direction of a line or ends it."""


def _printable(text: str) -> str:
    return "".join(" " if unicodedata.category(each) in _UNPRINTABLE else each for each in text)
