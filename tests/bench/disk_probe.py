"""How long an fsync takes meanwhile: a disk that others keep busy makes a capture look slow."""

from __future__ import annotations

import os
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_BYTES = b"\0" * (1 << 20)
_PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class DiskFigures:
    """Seconds that an fsync of 1 MiB took."""

    median_s: float
    max_s: float


class DiskProbe:
    """A context that writes and fsyncs 1 MiB now and then in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "fsync-probe"
        self._seconds: list[float] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._probe, daemon=True)

    def figures(self) -> DiskFigures:
        """What was seen; call it after the context."""
        return DiskFigures(statistics.median(self._seconds), max(self._seconds))

    def __enter__(self) -> DiskProbe:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._file.unlink()

    def _probe(self) -> None:
        while True:
            began = time.perf_counter()
            with self._file.open("wb", buffering=0) as file:
                file.write(_BYTES)
                os.fsync(file.fileno())
            self._seconds.append(time.perf_counter() - began)
            if self._ended.wait(_PAUSE_SECONDS):
                return
