"""Folders that live as long as a command, and not much longer than one that was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "stagetap-run-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder in ``TMPDIR``, removed at the end.

    ``kill -9`` leaves it behind, so whoever makes the next one removes those that nobody holds: a
    folder is locked as long as its process, or a child of it, lives.
    """
    _sweep()
    folder, lock = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what a dying child adds, the next sweep takes
        os.close(lock)


def _locked_folder() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            lock = os.open(folder, _DIRECTORY)
        except FileNotFoundError:
            continue  # swept by another process before it was locked
        with suppress(OSError):  # a file system without locks, where nothing is swept either
            fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder, lock
        os.close(lock)


def _sweep() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, _DIRECTORY)
        except OSError:
            continue  # gone, another user's, or no folder
        try:
            if os.fstat(lock).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # somebody holds it
        finally:
            os.close(lock)
