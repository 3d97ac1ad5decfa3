"""Stop before the disk is full: whether one more sample fits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

# Directories, the fragment's header, the error record or the commit line, file-system blocks.
SAMPLE_OVERHEAD_BYTES = 64 * 1024


class Room(Protocol):
    """Whether what is captured next has room where it goes."""

    def free_bytes(self) -> int | None:
        """Room now; None where nobody can say."""

    def observe(self, rows: int, stored_bytes: int) -> None:
        """Learn from a stored sample."""

    def admits(self, in_flight_rows: list[int]) -> bool:
        """Whether samples of these sizes fit."""


class NoDisk:
    """Memory that consumers empty: the store itself waits for room, and fails what finds none."""

    def free_bytes(self) -> None:
        """Nobody can say."""

    def observe(self, rows: int, stored_bytes: int) -> None:
        """Nothing to learn."""

    def admits(self, in_flight_rows: list[int]) -> bool:
        """Always."""
        return True


class DiskGuard:
    """Counts what is free and what the samples in flight may still take.

    Args:
        folder: on the disk in question; may not exist yet.
        keep_free_bytes: what must stay free.
        row_bytes: bytes of one token; learned from the first sample when not known.
        free_bytes: asked for the room on the disk of a folder.
    """

    def __init__(
        self,
        folder: Path,
        keep_free_bytes: int,
        row_bytes: int | None = None,
        free_bytes: Callable[[Path], int] | None = None,
    ) -> None:
        self._folder = _nearest_existing(folder)
        self.keep_free_bytes = keep_free_bytes
        self._row_bytes = row_bytes or 0
        self._free_bytes = free_bytes or _free_bytes

    def free_bytes(self) -> int:
        """Room on the disk now."""
        return self._free_bytes(self._folder)

    def sample_bytes(self, rows: int) -> int:
        """What a sample of that many tokens takes at most."""
        return rows * self._row_bytes + SAMPLE_OVERHEAD_BYTES

    def observe(self, rows: int, stored_bytes: int) -> None:
        """Learn from a stored sample."""
        if rows:
            self._row_bytes = max(self._row_bytes, -(-stored_bytes // rows) + 8)

    def admits(self, in_flight_rows: list[int]) -> bool:
        """Whether samples of these sizes fit and leave free what must stay free."""
        needed = sum(self.sample_bytes(rows) for rows in in_flight_rows)
        return self.free_bytes() - needed >= self.keep_free_bytes


def _nearest_existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free
