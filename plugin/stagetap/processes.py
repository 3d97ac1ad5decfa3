"""Other processes: all below one, and an end that reaches them. Linux only."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

WARNINGS_ENV = "PYTHONWARNINGS"

_TRACKER_IS_SILENT = "ignore::UserWarning:multiprocessing.resource_tracker"
# Its name alone stands among the options of every process that was told of its warnings.
_TRACKER_RUNS = b"from multiprocessing.resource_tracker import main"
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
            if _TRACKER_RUNS not in (folder / "cmdline").read_bytes():
                children.setdefault(parent, []).append(int(folder.name))
    found = [ancestor]
    for pid in found:
        found += children.get(pid, [])
    return found[1:]


def warnings_but_of_tracker() -> str:
    """``PYTHONWARNINGS`` as it is here, but for what multiprocessing's resource tracker warns of.

    That process ends after all others, so its list of what a killed one has left in shared memory,
    which it removes, would stand below the line that says why.
    """
    given = os.environ.get(WARNINGS_ENV, "")
    if _TRACKER_IS_SILENT in given.split(","):
        return given
    return f"{given},{_TRACKER_IS_SILENT}" if given else _TRACKER_IS_SILENT


def start_tracker() -> None:
    """Start the resource tracker of this process and of those it will start. Twice is no error."""
    os.environ[WARNINGS_ENV] = warnings_but_of_tracker()
    resource_tracker.ensure_running()


def end_with_parent() -> None:
    """In a child, between fork and exec: a parent that is killed takes it along."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def adopt_orphans() -> None:
    """Processes below this one whose parent ends become its children, and so its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)
