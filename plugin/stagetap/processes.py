"""Other processes: all below one, and an end that reaches them. Linux only."""

from __future__ import annotations

import ctypes
import signal
import sys
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def descendants(ancestor: int) -> list[int]:
    """All processes below one, but for the one that removes shared memory when all others ended.

    Not multiprocessing.active_children(): a child is missing there for as long as it starts.
    """
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # It has ended since.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"multiprocessing.resource_tracker" not in (folder / "cmdline").read_bytes():
                children.setdefault(parent, []).append(int(folder.name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def end_with_parent() -> None:
    """In a child, between fork and exec: a parent that is killed takes it along."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children, and so its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
