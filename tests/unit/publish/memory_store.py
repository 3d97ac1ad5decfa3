"""A store in memory that fails and hangs on demand, and publishers that write to it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from stagetap.publish.publisher import Publisher
from stagetap.stores.base import FragmentHeader, SampleRef, StoredFragment, StoreWriter
from store_samples import tapped

WHAT = tapped()
ROW_BYTES = 2 * 16 * 2  # two layers of hidden size 16 in bfloat16


def make_publisher(store: StoreWriter, **changes: Any) -> Publisher:
    """Two threads and two slots of four rows each."""
    fields: dict[str, Any] = {
        "slots": 2,
        "slot_bytes": 4 * ROW_BYTES,
        "writer_threads": 2,
        "refuse_nonfinite": False,
    }
    return Publisher(store, **(fields | changes))


class MemoryStore:
    """A store that keeps fragments in memory and fails or hangs where it is told to."""

    takes_pages = True

    def __init__(self) -> None:
        self.data: dict[tuple[str, int], bytes] = {}
        self.headers: list[FragmentHeader] = []
        self.aborted: list[str] = []
        self.on_open: Callable[[FragmentHeader], None] = lambda header: None
        self.on_write: Callable[[FragmentHeader, int], None] = lambda header, number: None
        self.on_finish: Callable[[FragmentHeader], None] = lambda header: None
        self.on_abort: Callable[[FragmentHeader], None] = lambda header: None

    def read_nonces(self) -> list[str]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def use_memory(self, memory: memoryview) -> None:
        self.memory = memory

    def open_fragment(self, header: FragmentHeader) -> "MemoryWriter":
        self.on_open(header)
        self.headers.append(header)
        return MemoryWriter(self, header)


class MemoryWriter:
    def __init__(self, store: MemoryStore, header: FragmentHeader) -> None:
        self.store, self.header = store, header
        self.rows = bytearray()
        self.writes = 0

    def write(self, pieces: Sequence[memoryview]) -> None:
        self.store.on_write(self.header, self.writes)
        self.writes += 1
        for piece in pieces:
            self.rows += piece

    def finish(self) -> StoredFragment:
        self.store.on_finish(self.header)
        self.store.data[self.header.ref.sample_id, self.header.stage] = bytes(self.rows)
        return StoredFragment(path="some/where", file_bytes=len(self.rows))

    def abort(self) -> None:
        self.store.aborted.append(self.header.ref.sample_id)
        self.store.on_abort(self.header)


def ref(sample_id: str = "s") -> SampleRef:
    return SampleRef(run_id="r", sample_id=sample_id, attempt="a")


def fail(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: Any) -> None:
        raise error

    return raise_it


class Hang:
    """Something to call that hangs until it is let go."""

    def __init__(self) -> None:
        self._entered, self._go = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        self._entered.set()
        assert self._go.wait(30)

    def wait_entered(self) -> None:
        assert self._entered.wait(30)

    def let_go(self) -> None:
        self._go.set()
