"""When a store keeps failing, stop asking it: the circuit breaker of exporting requests. Pure.

Closed, it counts samples that failed in a row. At the limit it opens: exporting requests are
refused with the last cause, which costs no forward pass. Half open, it lets one request through at
a time; the first commit closes it. Who knows that no probe could succeed holds it open: a stage
whose writes all hang, until one returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

PROBE_SECONDS = 5.0
"""How long an open breaker waits after a failure before it lets one request try."""

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Decides whether an exporting request may run.

    Args:
        limit: samples that fail in a row before it opens; 0 never opens it for that reason.
        clock: seconds, monotonic.
    """

    def __init__(self, limit: int, clock: Callable[[], float]):
        self._limit = limit
        self._clock = clock
        self._failures = 0
        self._cause = ""
        self._failed_at = 0.0
        self._probe: str | None = None
        self._held: dict[str, str] = {}  # why, by who holds it

    @property
    def state(self) -> BreakerState:
        """Closed, open, or half open: a probe may run, or runs."""
        if self._held:
            return "open"
        if not self._tripped():
            return "closed"
        if self._probe is not None or self._may_probe():
            return "half_open"
        return "open"

    def admit(self, request_id: str) -> str | None:
        """Whether a request may export: None, or why not."""
        if self._held:
            return f"exporting is suspended: {next(iter(self._held.values()))}"
        if not self._tripped():
            return None
        if self._probe is None and self._may_probe():
            self._probe = request_id
            return None
        return (
            f"exporting is suspended after {self._failures} failed samples in a row, the last one: "
            f"{self._cause}; one request at a time is let through to find out when that is over"
        )

    def committed(self, request_id: str) -> None:
        """A sample was committed: the store works."""
        self._failures = 0
        self._drop_probe(request_id)

    def failed(self, request_id: str, cause: str) -> None:
        """A sample failed."""
        self._failures += 1
        self._cause = cause
        self._failed_at = self._clock()
        self._drop_probe(request_id)

    def abandoned(self, request_id: str) -> None:
        """A request ended without telling anything about the store."""
        self._drop_probe(request_id)

    def hold(self, holder: str, why: str) -> None:
        """Stay open, and let no probe through, until the holder releases it."""
        self._held[holder] = why

    def release(self, holder: str) -> None:
        """The holder's reason is gone."""
        self._held.pop(holder, None)

    def _tripped(self) -> bool:
        return 0 < self._limit <= self._failures

    def _may_probe(self) -> bool:
        return self._clock() - self._failed_at >= PROBE_SECONDS

    def _drop_probe(self, request_id: str) -> None:
        if self._probe == request_id:
            self._probe = None
