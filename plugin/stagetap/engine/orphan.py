"""An engine whose front end has died ends too, and gives memory and store back."""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing import connection, parent_process


def end_with_parent() -> None:
    """In an engine process: once the process that started it is gone, ask this one to end.

    vLLM's workers watch their engine, but nobody watches the front end: killed with -9, it would
    leave an engine that serves nobody. In the front end's own process there is nothing to watch.
    """
    parent = parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stagetap-orphan", daemon=True).start()
