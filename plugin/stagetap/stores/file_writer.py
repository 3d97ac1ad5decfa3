"""The worker's side of the file store: fragments, durable before they are reported."""

import os
import threading
from collections.abc import Sequence

import numpy as np

from stagetap.errors import StoreError
from stagetap.stores.base import FragmentHeader, FragmentWriter, StoredFragment
from stagetap.stores.file_io import (
    fsync_directory,
    listed,
    make_below,
    make_root,
    naming,
    remove_if_there,
    scratch_path,
    write_all,
    write_scratch,
)
from stagetap.stores.file_layout import NONCES, attempt_path, encode_head, fragment_path, head_of


class FileStoreWriter:
    """Writes fragments below one directory."""

    takes_pages = False

    def __init__(self, root: str) -> None:
        """Prove that `root` can be written to. Raises StoreError."""
        self._root = root
        self._runs = _DurableNames(root)
        make_root(root)
        probe = scratch_path(root, "probe")
        with naming("write to the store", root):
            try:
                write_scratch(probe, b"stagetap")
            finally:
                remove_if_there(probe)

    def read_nonces(self) -> list[str]:
        """The nonces of all committers that use this directory. Raises StoreError."""
        directory = os.path.join(self._root, NONCES)
        nonces = []
        with naming("read", directory):
            for name in listed(directory):
                try:
                    with open(os.path.join(directory, name), encoding="utf-8") as file:
                        nonces.append(file.read())
                except FileNotFoundError:
                    continue  # the nonce of an engine that has just ended
        return nonces

    def use_memory(self, memory: memoryview) -> None:
        """The kernel reads any memory."""

    def open_fragment(self, header: FragmentHeader) -> FragmentWriter:
        """Create the fragment's file and write all that precedes its rows. Raises StoreError."""
        make_below(self._root, attempt_path(header.ref))
        return FileFragmentWriter(self._root, header, self._runs)

    def close(self) -> None:
        """Nothing is held open."""


class FileFragmentWriter:
    """One fragment: written under a scratch name, renamed once it is whole and durable."""

    def __init__(self, root: str, header: FragmentHeader, runs: "_DurableNames") -> None:
        self._root = root
        self._runs = runs
        self._relative_path = fragment_path(header.ref, header.stage)
        self._path = os.path.join(root, self._relative_path)
        self._directory = os.path.dirname(self._path)
        self._scratch = scratch_path(self._directory, str(header.stage))
        ids = b"" if header.token_ids is None else _int64_bytes(header.token_ids)
        head = head_of(
            header.ref, header.stage, header.layers, header.dtype, header.shape, bool(ids)
        )
        start, end = head.hidden_states.data_offsets
        self._missing_bytes = end - start
        prefix = encode_head(head) + ids
        self.file_bytes = len(prefix) + self._missing_bytes
        if os.path.lexists(self._path):
            raise StoreError(
                f"{self._path} exists already: an attempt id was used twice; use a fresh one",
                path=self._path,
            )
        with naming("write", self._path, self.file_bytes):
            self._fd = os.open(self._scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                write_all(self._fd, prefix)
            except OSError:
                self._discard()
                raise

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Append rows. Raises StoreError, also for more rows than the shape says."""
        self._missing_bytes -= sum(piece.nbytes for piece in pieces)
        if self._missing_bytes < 0:
            raise StoreError(
                f"{self._path}: {-self._missing_bytes} bytes more than its shape says",
                path=self._path,
            )
        with naming("write", self._path, self.file_bytes):
            for piece in pieces:
                write_all(self._fd, piece.cast("B"))

    def finish(self) -> StoredFragment:
        """Durable file, then durable name. Raises StoreError."""
        if self._missing_bytes:
            raise StoreError(
                f"{self._path}: {self._missing_bytes} bytes fewer than its shape says",
                path=self._path,
            )
        with naming("make durable", self._path, self.file_bytes):
            os.fsync(self._fd)
            self._close()
            os.rename(self._scratch, self._path)
            # The names that lead here: fragment, attempt and sample are new with this sample. All
            # owning stages do this, whoever created the directories, so a commit finds it done.
            sample = os.path.dirname(self._directory)
            fsync_directory(self._directory)
            fsync_directory(sample)
            fsync_directory(os.path.dirname(sample))
            self._runs.make_durable(os.path.dirname(sample))
        return StoredFragment(path=self._relative_path, file_bytes=self.file_bytes)

    def abort(self) -> None:
        """Remove the file. Raises StoreError."""
        with naming("remove", self._path):
            self._discard()
            # Also after a `finish` that failed behind the rename: nobody may take it for whole.
            remove_if_there(self._path)

    def _discard(self) -> None:
        self._close()
        remove_if_there(self._scratch)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class _DurableNames:
    """The runs whose names this process has made durable; they are few and long-lived."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._done: set[str] = set()
        self._lock = threading.Lock()

    def make_durable(self, run_directory: str) -> None:
        with self._lock:
            if run_directory not in self._done:
                fsync_directory(self._root)
                self._done.add(run_directory)


def _int64_bytes(ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(ids, dtype="<i8").tobytes()
