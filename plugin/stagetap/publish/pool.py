"""A fixed pool of fixed-size host buffers: the only memory through which fragments pass.

Slots go to the lowest ticket that waits, so fragments are served in the order in which they were
admitted, and a fragment holds at most one slot at a time: two fragments larger than the whole pool
cannot wait for each other.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from stagetap.errors import Refused, StageTapError

# Rows of any dtype start on a cache line, and pinned copies like it.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Slot:
    """One buffer of the pool: uint8 [slot_bytes] in host memory."""

    index: int
    buffer: torch.Tensor


class PoolClosed(StageTapError):
    """The pool was closed while somebody waited for a slot."""


class Cancelled(StageTapError):
    """The attempt died before its fragment was whole."""


class SlotPool:
    """`slots` buffers of `slot_bytes` each, allocated once."""

    def __init__(self, slots: int, slot_bytes: int, pin_memory: bool = False) -> None:
        if slots < 1 or slot_bytes < 1:
            raise Refused(f"a pool of {slots} slots of {slot_bytes} bytes: both must be at least 1")
        stride = -(-slot_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = torch.empty(slots, stride, dtype=torch.uint8, pin_memory=pin_memory)
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.memory = memory  # uint8 [slots, stride]: all slots lie in it
        self._free = [Slot(index, memory[index, :slot_bytes]) for index in range(slots)]
        self._waiting: list[int] = []
        self._changed = threading.Condition()
        self._closed = False
        self._waited_seconds = 0.0

    @property
    def in_use(self) -> int:
        """Slots that somebody holds now, a hung write's included."""
        return self.slots - len(self._free)

    @property
    def waiters(self) -> int:
        """Callers that wait for a slot now."""
        return len(self._waiting)

    @property
    def waited_seconds(self) -> float:
        """Time that all callers together have spent waiting for a slot."""
        return self._waited_seconds

    def acquire(self, ticket: int, cancelled: Callable[[], bool] = lambda: False) -> Slot:
        """A slot, as soon as one is free and no lower ticket waits. Raises PoolClosed.

        Raises Cancelled once `cancelled` is true; call `wake` after it became so.
        """
        started = time.monotonic()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: (
                        self._closed or cancelled() or (self._free and ticket == min(self._waiting))
                    )
                )
                if self._closed:
                    raise PoolClosed("the slot pool was closed: publishing has shut down")
                if cancelled():
                    raise Cancelled("cancelled before it got a slot")
                return self._free.pop()
            finally:
                self._waiting.remove(ticket)
                self._waited_seconds += time.monotonic() - started
                self._changed.notify_all()

    def release(self, slot: Slot) -> None:
        """Give a slot back. Only once nothing reads or writes it any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify_all()

    def wake(self) -> None:
        """Let everybody who waits look again whether they are cancelled."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Let everybody who waits fail at once. Slots in use stay valid until released."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def check_slot_bytes(slot_bytes: int, row_bytes: int) -> None:
    """Raise Refused when one row, [L_stage, H], does not fit a slot."""
    if row_bytes > slot_bytes:
        raise Refused(
            f"a slot of {slot_bytes} bytes cannot hold one row of {row_bytes} bytes: "
            f"set the slot size to at least {required_slot_bytes(row_bytes)}"
        )


def required_slot_bytes(row_bytes: int) -> int:
    """The smallest slot, in bytes, that holds one row of `row_bytes`."""
    return max(1, row_bytes)
