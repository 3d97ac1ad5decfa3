"""A Mooncake store in memory, shared by several connections, that can die at any step."""

import ctypes
import time
from collections.abc import Callable, Sequence

from stagetap.errors import StoreError
from stagetap.stores.mooncake_objects import Placed, StoreFull


class Died(Exception):
    """The process of this connection was killed: nothing that it would have done happens."""


class Master:
    """What all connections share: objects, and until when each is leased."""

    def __init__(self, lease_s: float = 0.0, room_bytes: int = 1 << 40) -> None:
        self.objects: dict[str, bytes] = {}
        self.lease_s = lease_s
        self.leases: dict[str, float] = {}
        self.room_bytes = room_bytes


class MemoryObjects:
    """One connection. `before` is called with the name of each changing step and its key."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self.registered: dict[int, int] = {}
        self.before: Callable[[str, str], None] = lambda step, key: None
        self.closed = False

    def put(self, key: str, data: bytes) -> None:
        self.before("put", key)
        stored = sum(map(len, list(self.master.objects.values())))  # others may put meanwhile
        if key not in self.master.objects:
            if stored + len(data) > self.master.room_bytes:
                raise StoreFull(f"no room for {key}")
            self.master.objects[key] = bytes(data)

    def put_from(self, objects: Sequence[Placed]) -> None:
        for each in objects:
            assert all(self._lies_in_registered_memory(*piece) for piece in each.pieces)
            self.put(each.key, b"".join(ctypes.string_at(*piece) for piece in each.pieces))

    def get(self, key: str) -> bytes | None:
        found = self.master.objects.get(key)
        if found is not None:
            self.master.leases[key] = time.monotonic() + self.master.lease_s
        return found

    def get_into(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes_bytes: Sequence[int],
        *,
        keep: object = None,
    ) -> list[int | None]:
        sizes: list[int | None] = []
        for key, address, size in zip(keys, addresses, sizes_bytes, strict=True):
            assert self._lies_in_registered_memory(address, size)
            data = self.get(key)
            if data is not None and len(data) <= size:
                ctypes.memmove(address, data, len(data))
            sizes.append(None if data is None else len(data))
        return sizes

    def exist(self, keys: Sequence[str]) -> list[bool]:
        return [self.get(key) is not None for key in keys]

    def ask_exist(self, keys: Sequence[str]) -> Callable[[], list[bool]]:
        found = self.exist(keys)
        return lambda: found

    def size(self, key: str) -> int | None:
        data = self.get(key)
        return None if data is None else len(data)

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[str]:
        left = []
        for key in keys:
            self.before("remove", key)
            if not force and self.master.leases.get(key, 0.0) > time.monotonic():
                left.append(key)
            else:
                self.master.objects.pop(key, None)
        return left

    def register(self, address: int, size_bytes: int, owner: object = None) -> None:
        self.registered[address] = size_bytes

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def close(self) -> None:
        self.closed = True

    def _lies_in_registered_memory(self, address: int, size_bytes: int) -> bool:
        return any(
            start <= address and address + size_bytes <= start + size
            for start, size in self.registered.items()
        )


def dies_at(step: int) -> Callable[[str, str], None]:
    """Let the connection die instead of its changing step of this number, from 0."""
    count = -1

    def die(*_: str) -> None:
        nonlocal count
        count += 1
        if count >= step:
            raise Died

    return die


def fails_at(step: int) -> Callable[[str, str], None]:
    """Let one changing step fail."""
    count = -1

    def fail(name: str, key: str) -> None:
        nonlocal count
        count += 1
        if count == step:
            raise StoreError(f"cannot {name} {key}", path=key)

    return fail
