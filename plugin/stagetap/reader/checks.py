"""Whether arguments make sense, before anything is done with them."""

from collections.abc import Sequence

from stagetap.errors import Refused


def check_choices(**given: tuple[object, Sequence[str]]) -> None:
    """By name, a value and what it may be. Raises Refused for the first that is none of them."""
    for name, (value, choices) in given.items():
        if value not in choices:
            raise Refused(f"{name}={value!r}: give one of {', '.join(map(repr, choices))}")


def check_numbers(**given: tuple[float | None, float]) -> None:
    """By name, a value, None if it may be left out, and the least that makes sense.

    Raises Refused for the first that is less, or no number.
    """
    for name, (value, least) in given.items():
        if value is not None and not value >= least:  # NaN is not
            raise Refused(f"{name}={value}: give {least} or more")
