"""Ctrl-C as a wish to stop: what is in flight ends, what is committed stays, and all is counted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from types import FrameType, TracebackType
from typing import Any

_WAKE = signal.SIGURG  # Ignored by default, and by all that we know: free to wake our own thread.
_END = b"\0"


class Interruption:
    """A context in which Ctrl-C reaches this process alone.

    A terminal signals the engine's processes as well, and those would drop what they are doing. So
    SIGINT is blocked in the main thread, which processes started inside the context inherit; a
    thread of ours receives it and wakes the main thread. There it raises KeyboardInterrupt, but
    for the first one inside :meth:`deferred`, which only sets ``requested``.

    Where SIGINT is ignored, as in a background job of a shell, it stays so.
    """

    def __init__(self, on_request: Callable[[], None] = lambda: None) -> None:
        self.requested = False
        self._on_request = on_request
        self._deferring = False
        self._main = threading.main_thread().ident
        self._waiter = threading.Thread(target=self._wait, name="stagetap-ctrl-c", daemon=True)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._noted = self._note = -1  # The ends of the pipe into which arriving signals are noted.

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, the first Ctrl-C is a wish; the second one raises KeyboardInterrupt."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def __enter__(self) -> Interruption:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            return self
        # Started later, it would unblock SIGINT for us.
        resource_tracker.ensure_running()
        self._noted, self._note = os.pipe()
        os.set_blocking(self._note, False)
        self._wakeup_before = signal.set_wakeup_fd(self._note, warn_on_full_buffer=False)
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._arrived)
        self._before[_WAKE] = signal.signal(_WAKE, lambda signum, frame: None)
        self._waiter.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._note, _END)
        self._waiter.join()
        os.close(self._note)
        os.close(self._noted)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _wait(self) -> None:
        """Whichever thread the signal hit, Python runs its handler in the main one: wake that."""
        assert self._main is not None
        while (number := os.read(self._noted, 1)) != _END:
            if number[0] == signal.SIGINT:
                signal.pthread_kill(self._main, _WAKE)

    def _arrived(self, signum: int, frame: FrameType | None) -> None:
        if not self._deferring or self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()
