"""The worker's side of the Mooncake store: fragments straight from where their rows are."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from stagetap.errors import StoreError
from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.stores.base import FragmentHeader, FragmentWriter, StoredFragment
from stagetap.stores.mooncake_buffers import BufferPool
from stagetap.stores.mooncake_calls import CallTimeout
from stagetap.stores.mooncake_index import read_writers
from stagetap.stores.mooncake_layout import fragment_path, input_ids_key, part_key
from stagetap.stores.mooncake_objects import Objects, Placed, put_when_there_is_room


class MooncakeStoreWriter:
    """Writes fragments of one run."""

    takes_pages = True

    def __init__(self, objects: Objects, run_id: str, room_timeout_s: float) -> None:
        """`room_timeout_s`: how long a write waits for room in a full store."""
        self._objects = objects
        self._run_id = run_id
        self._room_timeout_s = room_timeout_s
        self._registered: list[int] = []
        self._buffers = BufferPool(objects)  # for token ids

    def read_nonces(self) -> list[str]:
        """The nonces of all committers of the run. Raises StoreError."""
        return [record.nonce for record in read_writers(self._objects, self._run_id).records]

    def use_memory(self, memory: memoryview) -> None:
        """Register it, once: a transfer reads rows where they are. Raises StoreError."""
        address = _address(memory)
        self._objects.register(address, memory.nbytes, memory)
        self._registered.append(address)

    def open_fragment(self, header: FragmentHeader) -> FragmentWriter:
        """Start a fragment. Raises StoreError; its first `write` for an attempt used before."""
        if header.ref.run_id != self._run_id:
            raise StoreError(
                f"a fragment of run {header.ref.run_id!r} cannot go to run {self._run_id!r}: give "
                "the engine the run of its store's address"
            )
        ids: np.ndarray | None = None
        if header.token_ids is not None:
            ids = self._buffers.take(8 * len(header.token_ids))
            ids.view("<i8")[:] = header.token_ids
        return MooncakeFragmentWriter(self._objects, header, ids, self._room_timeout_s)

    def close(self) -> None:
        """Unregister what was registered and end the connection. Raises StoreError."""
        while self._registered:
            self._objects.unregister(self._registered.pop())
        self._objects.close()


class MooncakeFragmentWriter:
    """One fragment: an object, or numbered parts where it is larger than one write.

    There is nothing to make visible at the end: each part is there whole or not at all, and nobody
    looks for them before a commit names them.
    """

    def __init__(
        self,
        objects: Objects,
        header: FragmentHeader,
        ids: np.ndarray | None,
        room_timeout_s: float,
    ) -> None:
        """`ids`: the token ids in registered memory, uint8 [8 T]."""
        self._objects = objects
        self._room_timeout_s = room_timeout_s
        self._path = fragment_path(header.ref, header.stage)
        self._total_bytes = math.prod(header.shape) * DTYPE_ITEMSIZE[header.dtype]
        self._missing_bytes = self._total_bytes
        self._first_bytes: int | None = None
        self._parts: list[str] = []
        self._tried: list[str] = []  # what abort has to remove
        # What must not be there: a put would be ignored, and a commit name what others have stored.
        # The answer comes while the first rows are prepared.
        keys = [self._path, part_key(self._path, 0), input_ids_key(self._path)]
        self._exist: Callable[[], list[bool]] | None = objects.ask_exist(keys)
        self._ids = ids  # until they are put, together with the first rows

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Store rows as the next part. The memory is free again on return, however it ends.

        Raises StoreError, also for more rows than the shape says, and StoreFull when no room was
        made in time.
        """
        size = sum(piece.nbytes for piece in pieces)
        self._missing_bytes -= size
        if self._missing_bytes < 0:
            raise self._wrong(f"{-self._missing_bytes} bytes more than its shape says")
        if self._exist is not None:
            self._check_fresh(self._exist)
            self._exist = None
        if self._first_bytes is None:
            self._first_bytes = size
        if size > self._first_bytes or (size < self._first_bytes and self._missing_bytes):
            raise self._wrong("parts of different sizes: only the last one may be smaller")
        whole = size == self._total_bytes
        key = self._path if whole else part_key(self._path, len(self._parts))
        objects = [_placed(key, pieces)]
        if self._ids is not None:
            objects.append(_placed(input_ids_key(self._path), [self._ids.data]))
        self._tried += [each.key for each in objects]
        put_when_there_is_room(
            partial(self._put, objects),
            self._room_timeout_s,
            f"{key} ({size} of {self._total_bytes} bytes)",
        )
        self._ids = None
        if not whole:
            self._parts.append(key)

    def finish(self) -> StoredFragment:
        """Where the fragment is. Raises StoreError when it is short."""
        if self._missing_bytes:
            raise self._wrong(f"{self._missing_bytes} bytes fewer than its shape says")
        return StoredFragment(path=self._path, file_bytes=None, parts=tuple(self._parts))

    def abort(self) -> None:
        """Remove all that was put. Nobody can be reading it. Raises StoreError."""
        self._objects.remove(self._tried, force=True)

    def _check_fresh(self, exist: Callable[[], list[bool]]) -> None:
        if any(exist()):
            raise StoreError(
                f"{self._path} exists already: an attempt id was used twice; use a fresh one",
                path=self._path,
            )

    def _put(self, objects: Sequence[Placed]) -> None:
        try:
            self._objects.put_from(objects)
        except CallTimeout as error:
            # It goes on and still reads the rows: slot or pages are not free before it returned.
            error.returned.wait()
            raise

    def _wrong(self, reason: str) -> StoreError:
        return StoreError(f"{self._path}: {reason}", path=self._path)


def _placed(key: str, pieces: Sequence[memoryview]) -> Placed:
    return Placed(key, tuple((_address(piece), piece.nbytes) for piece in pieces))


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
