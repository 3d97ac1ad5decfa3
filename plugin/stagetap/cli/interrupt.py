"""Ctrl-C as a wish to stop: what is in flight ends, what is committed stays, and all is counted."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from stagetap.processes import descendants, start_tracker

INTERRUPTED_EXIT = 130

_END = b"\0"


def end_now() -> None:
    """End this process and the engine's, from any thread and whatever they are doing.

    An exception would have to find its way through whichever library the main thread is in: some
    swallow it, others abort. Nothing is lost by this: a commit is durable when it is made.
    """
    os.write(2, b"\nstagetap: interrupted\n")
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(INTERRUPTED_EXIT)


@contextmanager
def termination_interrupts() -> Iterator[None]:
    """In the main thread: SIGTERM ends the body as Ctrl-C does, so that it cleans up.

    The default would leave its children and its folders behind.
    """

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interruption:
    """A context in which Ctrl-C reaches this process alone.

    A terminal signals the engine's processes as well, and those would drop what they are doing. So
    SIGINT is blocked in the main thread, which processes started inside the context inherit, and a
    thread of ours acts on it: it calls ``end``, but for the first one after :meth:`defer`, which
    only sets ``requested`` and calls ``on_request``. SIGTERM always ends: it must take the engine's
    processes along, which live in a process group of their own.

    Where SIGINT is ignored, as in a background job of a shell, it stays so; SIGTERM is heard.
    """

    def __init__(
        self, on_request: Callable[[], None] = lambda: None, end: Callable[[], None] = end_now
    ) -> None:
        self.requested = False
        self._deferring = False
        self._on_request = on_request
        self._end = end
        self._thread = threading.Thread(target=self._watch, name="stagetap-ctrl-c", daemon=True)
        self._handler_before: Any = None
        self._terminate_before: Any = None
        self._wakeup_before = -1
        self._noted = self._note = -1  # The ends of the pipe into which arriving signals are noted.

    def defer(self) -> None:
        """From now on the first Ctrl-C is a wish."""
        self._deferring = True

    def __enter__(self) -> Interruption:
        # Started later, it would unblock SIGINT for us.
        start_tracker()
        self._noted, self._note = os.pipe()
        os.set_blocking(self._note, False)
        # Whichever thread the signal hits, it is noted at once; a handler would have to wait for
        # the main thread to leave what it is in.
        self._wakeup_before = signal.set_wakeup_fd(self._note, warn_on_full_buffer=False)
        self._handler_before = signal.getsignal(signal.SIGINT)
        if self._handler_before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda signum, frame: None)
        self._terminate_before = signal.signal(signal.SIGTERM, lambda signum, frame: None)
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        os.write(self._note, _END)
        self._thread.join()
        os.close(self._note)
        os.close(self._noted)
        signal.signal(signal.SIGINT, self._handler_before)
        signal.signal(signal.SIGTERM, self._terminate_before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def _watch(self) -> None:
        while (number := os.read(self._noted, 1)) != _END:
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if number[0] == signal.SIGTERM or self.requested or not self._deferring:
                self._end()
            else:
                self.requested = True
                self._on_request()
