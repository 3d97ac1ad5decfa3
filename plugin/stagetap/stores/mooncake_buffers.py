"""Registered memory that fragments are read into, used again as soon as nobody holds it.

A buffer goes back by itself when the last tensor on it goes: no reader can be made to wait, and no
tensor that somebody still holds can be overwritten.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from stagetap.stores.mooncake_objects import Objects

_SMALLEST_BYTES = 64 * 1024
_IDLE_OF_A_SIZE = 4

Allocate = Callable[[int], np.ndarray]


def host_memory(size_bytes: int) -> np.ndarray:
    """uint8 [size_bytes], page-locked when there is a CUDA device to copy it to."""
    import torch

    pinned = torch.cuda.is_available()
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).numpy()


class BufferPool:
    """Buffers of a few sizes, each a power of two, registered when they are made.

    `idle` of each size are kept for the next reader; more than that are let go.
    """

    def __init__(
        self, objects: Objects, allocate: Allocate = host_memory, idle: int = _IDLE_OF_A_SIZE
    ) -> None:
        self._objects = objects
        self._allocate = allocate
        self._idle = idle
        self._lock = threading.Lock()
        self._free: dict[int, list[np.ndarray]] = {}
        # What finalizers append to. They run in the middle of anything, so they do nothing else.
        self._returned: deque[np.ndarray] = deque()
        self.made = 0

    def take(self, size_bytes: int) -> np.ndarray:
        """uint8 [size_bytes] in registered memory, for as long as something refers to it.

        Raises StoreError.
        """
        size_class = max(_SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length())
        with self._lock:
            surplus = self._sort_returned()
            free = self._free.get(size_class)
            memory = free.pop() if free else None
        for each in surplus:
            self._objects.unregister(_address(each))
        if memory is None:
            memory = self._allocate(size_class)
            self._objects.register(_address(memory), size_class, memory)
            self.made += 1
        loan = _Loan(memory, size_bytes)
        weakref.finalize(loan, self._returned.append, memory).atexit = False
        # numpy keeps the loan as the base of all arrays, views and memoryviews that come from it.
        return np.asarray(loan)

    def _sort_returned(self) -> list[np.ndarray]:
        """Put what came back where it is found again; what there is enough of. Lock held."""
        surplus = []
        while self._returned:
            memory = self._returned.popleft()
            free = self._free.setdefault(memory.nbytes, [])
            if len(free) < self._idle:
                free.append(memory)
            else:
                surplus.append(memory)
        return surplus


class _Loan:
    """What arrays on a buffer refer to; when it goes, the buffer is free."""

    def __init__(self, memory: np.ndarray, size_bytes: int) -> None:
        self._memory = memory
        self._size_bytes = size_bytes

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self._size_bytes,),
            "typestr": "|u1",
            "data": (_address(self._memory), False),
            "version": 3,
        }


def _address(memory: np.ndarray) -> int:
    return int(memory.ctypes.data)
