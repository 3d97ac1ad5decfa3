"""Ctrl-C as a wish to stop, so that what is committed stays and what is in flight can end."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any


class Interruption:
    """A context in which the first Ctrl-C only sets ``requested``; the second one acts as usual."""

    def __init__(self) -> None:
        self.requested = False
        self._previous: Any = signal.SIG_DFL

    def __enter__(self) -> Interruption:
        self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
