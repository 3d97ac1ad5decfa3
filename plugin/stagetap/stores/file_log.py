"""Append-only logs: one file per writer, one line per entry, each line its own witness.

A line is a JSON object whose first field, `check`, is the xxh3_64 of all that follows it up to the
newline. So a reader can tell the torn last line of a writer that was killed (no newline yet: not
written) from a line that somebody changed (an error, because ignoring it would lose a sample).
"""

import os
import socket
import uuid
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeVar

import xxhash

from stagetap.errors import CorruptLog, StoreError
from stagetap.keys import component
from stagetap.stores.file_io import fsync_directory, lock_exclusively, naming, write_all
from stagetap.stores.file_layout import LOG_SUFFIX

_PREFIX = b'{"check":"xxh3_64:'
_BODY_START = len(_PREFIX) + 16 + len(b'",')
_CHUNK_BYTES = 8 << 20

Entry = TypeVar("Entry")
# Writer -> bytes and lines read of its log.
Marks = dict[str, tuple[int, int]]


class Line(NamedTuple):
    """One whole line of a log; `number` counts from 0, `body` is the JSON object without check."""

    writer: str
    number: int
    offset: int
    length: int
    body: bytes


def encode_line(body: bytes) -> bytes:
    """The line that holds a non-empty JSON object."""
    rest = body[1:]
    return b'%b%016x",%b\n' % (_PREFIX, xxhash.xxh3_64_intdigest(rest), rest)


def decode_line(line: bytes) -> bytes | None:
    """The JSON object of a line without its newline, or None for what is not such a line."""
    rest = line[_BODY_START:]
    expected = b'%b%016x",' % (_PREFIX, xxhash.xxh3_64_intdigest(rest))
    return b"{" + rest if line[:_BODY_START] == expected else None


def new_writer_name() -> str:
    """A name that no other writer has: host, process and a random part."""
    return f"{component(socket.gethostname())}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class LogWriter:
    """One log, locked for as long as it is open. Not safe to use from several threads."""

    def __init__(self, directory: str, writer: str) -> None:
        """Create the log. Raises StoreError."""
        self.path = os.path.join(directory, writer + LOG_SUFFIX)
        self._size_bytes = 0
        with naming("create the log", self.path):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                self._identity = _identity(os.fstat(self._fd))
                lock_exclusively(self._fd)
                fsync_directory(directory)
            except OSError:
                self.close()
                raise

    def append(self, body: bytes) -> None:
        """Add one JSON object, durably. Raises StoreError; then the log is as it was.

        When even that cannot be had, the log is closed, and `usable` says so.
        """
        line = encode_line(body)
        with naming("append to", self.path, len(line)):
            # A line in a file that has been removed from its directory would be seen by nobody.
            if _identity(os.stat(self.path)) != self._identity:
                raise StoreError(
                    f"{self.path} was replaced while in use: restart the engine", path=self.path
                )
            try:
                write_all(self._fd, line)
                os.fsync(self._fd)
            except OSError:
                self._take_back()
                raise
        self._size_bytes += len(line)

    @property
    def usable(self) -> bool:
        """Whether more can be appended."""
        return self._fd >= 0

    def close(self) -> None:
        """Give up the lock. Twice is no error."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take_back(self) -> None:
        """Remove what a failed append left, which may be a whole line that is not durable."""
        try:
            os.ftruncate(self._fd, self._size_bytes)
            os.fsync(self._fd)
        except OSError:
            self.close()


class LogFolder:
    """All logs of a directory, read onwards from a mark."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._marks: Marks = {}

    def read(
        self, decode: Callable[[Line], Entry], skip: Collection[str] = ()
    ) -> tuple[list[Entry], Marks]:
        """The entries behind the mark, per log in order, and the mark behind them.

        Logs of the writers in `skip` are passed over. Nothing counts as read until `advance`: a
        line that cannot be read loses none before it. Raises CorruptLog for a line that is whole
        and wrong, StoreError, and what `decode` raises.
        """
        with naming("list the logs in", self._directory):
            names = sorted(os.listdir(self._directory))
        writers = [n.removesuffix(LOG_SUFFIX) for n in names if n.endswith(LOG_SUFFIX)]
        writers = [writer for writer in writers if writer not in skip]
        lost = self._marks.keys() - set(writers)
        if lost:
            path = self._path(min(lost))
            raise StoreError(
                f"{path} is gone, and with it the commits in it: restore it", path=path
            )
        entries: list[Entry] = []
        marks: Marks = {}
        for writer in writers:
            offset, number = self._marks.get(writer, (0, 0))
            for line in self._lines(writer, offset, number):
                entries.append(decode(line))
                offset, number = line.offset + line.length + 1, line.number + 1
            marks[writer] = (offset, number)
        return entries, marks

    def advance(self, marks: Marks) -> None:
        """Let the next `read` start here."""
        self._marks = marks

    def line(self, writer: str, offset: int, length: int) -> bytes:
        """The body of a line that `read` has returned. Raises StoreError."""
        path = self._path(writer)
        with naming("read", path, length):
            fd = os.open(path, os.O_RDONLY)
            try:
                raw = os.pread(fd, length, offset)
            finally:
                os.close(fd)
        body = decode_line(raw)
        if body is None:
            raise CorruptLog(
                f"{path}: the line at byte {offset} changed since it was first read: restore the "
                "file, then open the dataset again",
                path=path,
            )
        return body

    def _lines(self, writer: str, offset: int, number: int) -> Iterator[Line]:
        path = self._path(writer)
        with naming("read", path):
            fd = os.open(path, os.O_RDONLY)
        try:
            if os.fstat(fd).st_size < offset:
                raise StoreError(
                    f"{path} became shorter than the {offset} bytes read of it: its writer could "
                    "not make a commit durable; check the disk and open the dataset again",
                    path=path,
                )
            for line in _whole_lines(fd, path, offset):
                body = decode_line(line)
                if body is None:
                    raise CorruptLog(
                        f"{path} line {number + 1} is corrupt: restore the file, or remove that "
                        "line and with it its sample",
                        path=path,
                        line=number + 1,
                    )
                yield Line(writer, number, offset, len(line), body)
                offset += len(line) + 1
                number += 1
        finally:
            os.close(fd)

    def _path(self, writer: str) -> str:
        return os.path.join(self._directory, writer + LOG_SUFFIX)


def _whole_lines(fd: int, path: str, offset: int) -> Iterator[bytes]:
    """The lines from `offset` on that have their newline; what follows the last one is torn."""
    torn = b""
    while True:
        with naming("read", path):
            chunk = os.pread(fd, _CHUNK_BYTES, offset)
        if not chunk:
            return
        offset += len(chunk)
        *lines, torn = (torn + chunk).split(b"\n")
        yield from lines


def _identity(status: os.stat_result) -> tuple[int, int]:
    return (status.st_dev, status.st_ino)
