"""Calls into a library that may block for long, each with a bound for the one who waits.

A blocked call cannot be ended. So it runs in a thread of its own, and who waits for it is told when
the time is up. What the call was given stays alive until it returns: the thread holds it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from stagetap.errors import StoreError

Result = TypeVar("Result")

_MOST_THREADS = 64
_EXIT_SECONDS = 15.0


class CallTimeout(StoreError):
    """A call did not return in time, and goes on.

    Until `returned` is set it may still read or write the memory that it was given.
    """

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        size_bytes: int | None = None,
        returned: threading.Event | None = None,
    ) -> None:
        super().__init__(message, path=path, size_bytes=size_bytes)
        self.returned = returned if returned is not None else threading.Event()

    def __reduce__(self) -> tuple[type[CallTimeout], tuple[str]]:
        # The event means something in this process alone.
        return type(self), (str(self),)


class _Task(Generic[Result]):
    """One call: what to do, and what came of it."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call: Callable[[], Result] | None = call
        self._result: Result | None = None
        self._error: BaseException | None = None
        self.returned = threading.Event()

    def run(self) -> None:
        assert self._call is not None
        try:
            self._result = self._call()
        except BaseException as error:  # noqa: BLE001 It is raised where somebody waits.
            self._error = error
        self._call = None
        self.returned.set()

    def outcome(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class BoundedCalls:
    """Threads that make calls; as many as there were calls at once. Safe for many callers."""

    def __init__(self, name: str, most_threads: int = _MOST_THREADS) -> None:
        self._name = name
        self._most_threads = most_threads
        self._changed = threading.Condition()
        self._idle: list[SimpleQueue[_Task[Any] | None]] = []
        self._threads = 0
        self._ended = False
        # A call that returns while the interpreter goes down aborts the process.
        atexit.register(self.end, _EXIT_SECONDS)

    @property
    def running(self) -> int:
        """Calls that have not returned, those that nobody waits for any more included."""
        with self._changed:
            return self._threads - len(self._idle)

    def run(
        self, call: Callable[[], Result], timeout_s: float, what: str, path: str | None = None
    ) -> Result:
        """What `call` returns or raises. `what` names it in errors.

        Raises CallTimeout after `timeout_s`, StoreError when too many earlier calls hang.
        """
        return self.start(call, timeout_s, what, path)()

    def start(
        self, call: Callable[[], Result], timeout_s: float, what: str, path: str | None = None
    ) -> Callable[[], Result]:
        """As `run`, but do not wait: what is returned does, `timeout_s` from then on."""
        task = _Task(call)
        self._inbox(what, path).put(task)

        def outcome() -> Result:
            if not task.returned.wait(timeout_s):
                raise CallTimeout(
                    f"{what} took longer than {timeout_s:g} s and has not ended: is the store "
                    "alive and the network up?",
                    path=path,
                    returned=task.returned,
                )
            return task.outcome()

        return outcome

    def end(self, timeout_s: float) -> bool:
        """Take no more calls, and wait for those that run; whether all returned in time."""
        atexit.unregister(self.end)
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._ended = True
            while self._threads > len(self._idle):
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            for inbox in self._idle:
                inbox.put(None)
            all_returned = self._threads == len(self._idle)
            self._threads -= len(self._idle)
            self._idle.clear()
        return all_returned

    def _inbox(self, what: str, path: str | None) -> SimpleQueue[_Task[Any] | None]:
        """Where an idle thread takes its next call from."""
        with self._changed:
            if self._ended:
                raise StoreError(f"{what}: this connection is closed", path=path)
            if self._idle:
                return self._idle.pop()
            if self._threads >= self._most_threads:
                raise StoreError(
                    f"{what}: {self._threads} earlier calls have not returned", path=path
                )
            self._threads += 1
        inbox: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        thread = threading.Thread(
            target=self._serve, args=(inbox,), name=f"stagetap-{self._name}", daemon=True
        )
        thread.start()
        return inbox

    def _serve(self, inbox: SimpleQueue[_Task[Any] | None]) -> None:
        while (task := inbox.get()) is not None:
            task.run()
            del task  # What it was given need not live until the next one comes.
            with self._changed:
                if self._ended:
                    self._threads -= 1
                    self._changed.notify_all()
                    return
                self._idle.append(inbox)
                self._changed.notify_all()
