"""A stdout whose failure is an error of ours, with a name: what is written there may be a file."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from stagetap.errors import StageTapError


def open_stdout(fd: int, *, closefd: bool) -> TextIO:
    """A text stream to ``fd``, which is stdout or a copy of it.

    Its writes raise StageTapError where the operating system refuses them, and BrokenPipeError
    where nobody reads on. After the first of these it drops what it is given: the interpreter's
    own flush at the end has nothing to add.
    """
    like = sys.__stdout__
    return io.TextIOWrapper(
        io.BufferedWriter(_Stdout(fd, "w", closefd=closefd)),
        encoding=like.encoding if like else "utf-8",
        errors=like.errors if like else "strict",
        line_buffering=os.isatty(fd),
    )


@contextmanager
def named_stdout() -> Iterator[None]:
    """``sys.stdout`` is such a stream, and flushed at the end; one in memory stays what it is.

    Raises:
        StageTapError: stdout is closed, or cannot be written.
    """
    before = sys.stdout
    if before is None:
        raise StageTapError("stdout is closed: give it somewhere to go, such as >/dev/null")
    if not _has_descriptor(before):
        yield
        return
    sys.stdout = ours = open_stdout(1, closefd=False)
    try:
        yield
    finally:
        sys.stdout = before
        try:
            ours.flush()
        except BrokenPipeError:
            sys.exit(1)  # quietly, as a reader like `head` expects


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except io.UnsupportedOperation:
        return False
    return True


class _Stdout(io.FileIO):
    _failed = False

    def write(self, data: Any, /) -> int:
        if self._failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except BrokenPipeError:
            self._failed = True
            raise
        except OSError as error:
            self._failed = True
            name = errno.errorcode.get(error.errno or 0, "unknown error")
            raise StageTapError(
                f"cannot write to stdout ({_target(self.fileno())}): {error.strerror} [{name}]: "
                "send it where there is room and the right to write"
            ) from error


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return "unknown"  # no /proc here
