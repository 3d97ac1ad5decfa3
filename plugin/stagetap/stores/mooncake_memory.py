"""How much memory a process of this machine can lend to a store, or keep for staging."""

from __future__ import annotations

import os

from stagetap.errors import Refused


def check_fits(option: str, size_bytes: int) -> None:
    """Raise Refused, naming the option, for more than this machine has.

    Mooncake would only say that its parameters are invalid, or end.
    """
    has_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > has_bytes:
        raise Refused(
            f"{option}: {size_bytes} bytes are more than the {has_bytes} of memory that this "
            "machine has: give less"
        )
