"""One thread that asks the store, so that one that does not answer never holds up a step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class StoreThread:
    """Runs calls one after the other, in the order of their submission.

    No ``ThreadPoolExecutor``: Python waits for its threads at exit, and a call that hangs in a dead
    file system would keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], Any] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queue a call; its future can be cancelled until the call begins."""
        future: Future[Any] = Future()
        self._calls.put((future, function, args))
        return future

    def shutdown(self, timeout_s: float) -> bool:
        """Finish what is queued; whether that took no longer than ``timeout_s``."""
        self._calls.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 -- the future carries it to who asked
                future.set_exception(error)
            else:
                future.set_result(result)
