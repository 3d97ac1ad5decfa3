"""A publisher over a store in memory; all that was submitted has ended when a test ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stagetap.publish.publisher import Publisher
from unit.publish.memory_store import MemoryStore, make_publisher


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def publisher(store: MemoryStore) -> Iterator[Publisher]:
    publisher = make_publisher(store)
    yield publisher
    assert publisher.shutdown(10) == []
