"""Replace several files of a directory tree: all of them, or none."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

_NEW, _OLD = ".stagetap-new", ".stagetap-old"


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Hold ``folder`` against other processes that patch it; leaves no lock file behind."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def swap(new: Mapping[Path, bytes | None]) -> None:
    """Give every file its new bytes; None removes it. Modes and owners stay.

    All writing is done beside the files before the first of them is touched, the way back
    included, so that a full disk or a forbidden directory stops it while nothing has changed.
    Each file then changes by one rename: a reader sees the old file or the new one, and a copy
    that shares the inode (package managers hard-link from their caches) keeps its bytes. When
    anything is raised half-way, every file gets its old bytes back before the error goes on.
    The old copies stay beside the files until ``sweep`` is called.

    Raises OSError, naming the file.
    """
    done: list[Path] = []
    sweep(new)
    try:
        for path, data in new.items():
            _stage(path, data)
        for path, data in new.items():
            done.append(path)
            if data is None:
                path.unlink(missing_ok=True)
            else:
                os.replace(_beside(path, _NEW), path)
    except BaseException:
        for path in reversed(done):
            _restore(path)
        sweep(new)
        raise


def sweep(paths: Iterable[Path]) -> None:
    """Remove what a swap of these files, finished or killed, left beside them."""
    for path in paths:
        for suffix in (_NEW, _OLD):
            if (left := _beside(path, suffix)).exists():  # unlink alone fails on a read-only disk
                left.unlink()


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f".{path.name}{suffix}")


def _stage(path: Path, data: bytes | None) -> None:
    old, new = _beside(path, _OLD), _beside(path, _NEW)
    if path.exists():
        shutil.copy2(path, old)
        _give_owner(old, path)
    if data is not None:
        new.write_bytes(data)
        if path.exists():
            shutil.copymode(path, new)
            _give_owner(new, path)
            _make_newer(new, path)
        _sync(new)


def _restore(path: Path) -> None:
    old = _beside(path, _OLD)
    if old.exists():
        os.replace(old, path)
    else:
        path.unlink(missing_ok=True)


def _give_owner(staged: Path, like: Path) -> None:
    wanted, have = like.stat(), staged.stat()
    if (wanted.st_uid, wanted.st_gid) != (have.st_uid, have.st_gid):
        os.chown(staged, wanted.st_uid, wanted.st_gid)


def _make_newer(staged: Path, than: Path) -> None:
    """Byte code is matched by size and whole seconds: both versions must never share a second."""
    newer_ns = (than.stat().st_mtime_ns // 10**9 + 1) * 10**9
    stamp_ns = max(time.time_ns(), newer_ns)
    os.utime(staged, ns=(stamp_ns, stamp_ns))


def _sync(path: Path) -> None:
    """After a power cut a renamed file must not be an empty one."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
