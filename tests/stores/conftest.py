"""Real directories, and file systems that are full or read-only."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from store_samples import Engine
from tmpfs import mount_tmpfs as mount_tmpfs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store that does not exist yet."""
    return tmp_path / "store"


@pytest.fixture
def engine(root: Path) -> Iterator[Engine]:
    """An engine on a fresh store."""
    engine = Engine(root)
    yield engine
    engine.close()
