"""What a check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass

SEE_FOUND = "as found says"
"""The cure of what has said its own."""


@dataclass(frozen=True)
class Finding:
    """One check. ``cure`` is None when nothing is wrong."""

    check: str
    found: str
    cure: str | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return self.cure is None
