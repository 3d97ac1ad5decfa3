"""What the Mooncake store needs of a connection, and the few operations that are built on it.

The real one is `mooncake_client.py`. Everything above this file talks to `Objects`, so that the
order of steps can be tested with a store that dies between any two of them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stagetap.errors import StoreError
from stagetap.stores.mooncake_records import is_intact

_PAUSE_SECONDS = (0.005, 0.2)  # the first pause between two tries, and the longest
CREATE_SECONDS = 5.0

ABANDONED_SECONDS = 45.0
"""By then a key can be put that a process was putting when it died: the master gives it up after
30 s (its -put_start_discard_timeout_sec)."""

MAKE_ROOM = (
    "let consumers delete what they have read, or lend more memory (`stagetap store up --lend`, or "
    "global_segment_size of the engine's workers)"
)
"""What to do about a full store."""


class StoreFull(StoreError):
    """No segment has room for an object now."""


@dataclass(frozen=True)
class Placed:
    """What an object shall be: pieces of registered memory, (address, bytes), in their order."""

    key: str
    pieces: tuple[tuple[int, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the object."""
        return sum(size for _, size in self.pieces)


class Objects(Protocol):
    """Immutable objects under keys: what is there under a key stays, until it is removed."""

    def put(self, key: str, data: bytes) -> None:
        """Store an object. Where one is, or is just being made, nothing happens.

        Raises StoreFull or StoreError.
        """

    def put_from(self, objects: "Sequence[Placed]") -> None:
        """As `put`, several at once, from registered memory; it is free again on return.

        CallTimeout says that it is not: the put goes on. Raises for the first object that failed;
        others may be stored.
        """

    def get(self, key: str) -> bytes | None:
        """The object; None when there is none. Raises StoreError."""

    def get_into(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes_bytes: Sequence[int],
        *,
        keep: object = None,
    ) -> list[int | None]:
        """Objects into registered memory: how many bytes each had; None where there is none.

        An object larger than its place is not read. `keep` lives until the memory is not written
        to any more, also when the call gives up earlier. Raises StoreError.
        """

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which of the keys hold an object. Raises StoreError."""

    def ask_exist(self, keys: Sequence[str]) -> Callable[[], list[bool]]:
        """As `exist`, but do not wait: what is returned does. Raises StoreError, both times."""

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when there is none. Raises StoreError."""

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[str]:
        """Remove objects; the keys that stay because somebody reads them, never with `force`.

        That there is none is no error. Raises StoreError.
        """

    def register(self, address: int, size_bytes: int, owner: object = None) -> None:
        """Let transfers use this memory. Raises StoreError.

        `owner` lives for as long as they may.
        """

    def unregister(self, address: int) -> None:
        """End that, before the memory goes. Raises StoreError."""

    def close(self) -> None:
        """End the connection. Twice is no error."""


def read(objects: Objects, key: str) -> bytes | None:
    """A sealed object; None when there is none. Raises StoreError.

    It is damaged only if it still is at a second look: the first may have met its removal.
    """
    data = objects.get(key)
    if data is None or is_intact(key, data):
        return data
    return objects.get(key)


def create(
    objects: Objects,
    key: str,
    data: bytes,
    timeout_s: float = CREATE_SECONDS,
    others_s: float = CREATE_SECONDS,
) -> bytes:
    """Put a sealed object if there is none, and return the one that is there then, perhaps another.

    Of several who do this at once all get the same answer: the first put wins, and who wins is
    known only by reading. In a full store it waits for room. Raises StoreFull after `timeout_s`,
    StoreError after `others_s` in which another one has not ended its put: see `ABANDONED_SECONDS`.
    """
    found: bytes | None = None

    def is_there() -> bool:
        nonlocal found
        objects.put(key, data)
        # None: the winner is still writing it, or has removed it since. Then it is to be had anew.
        found = read(objects, key)
        return found is not None

    def put() -> None:
        if not wait_until(is_there, others_s):
            raise StoreError(
                f"{key} is not there {others_s:g} s after it was put: another process began to put "
                "it and has not ended; try again",
                path=key,
            )

    put_when_there_is_room(put, timeout_s, key)
    assert found is not None
    return found


def wait_until(done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until the answer is yes, with growing pauses; whether it came in time."""
    deadline = time.monotonic() + timeout_s
    pause, longest = _PAUSE_SECONDS
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, longest)
    return True


def put_when_there_is_room(put: Callable[[], None], timeout_s: float, what: str) -> None:
    """Run a put again and again as long as the store is full: consumers make room.

    Raises StoreFull after `timeout_s`, StoreError.
    """
    full: StoreFull | None = None

    def stored() -> bool:
        nonlocal full
        try:
            put()
        except StoreFull as error:
            full = error
            return False
        return True

    if not wait_until(stored, timeout_s):
        # Not `full` in words: it names the key and what to do as well.
        raise StoreFull(f"no room for {what} within {timeout_s:g} s: {MAKE_ROOM}") from full
