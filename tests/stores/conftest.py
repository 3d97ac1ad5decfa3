"""Real directories, and file systems that are full or read-only."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from store_samples import Engine
from tmpfs import Tmpfs


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


@pytest.fixture
def mount_tmpfs(tmp_path: Path) -> Iterator[Callable[[int], Tmpfs]]:
    """Mount a tmpfs of so many MiB. Root ignores permission bits, but not a full or ro mount."""
    if os.geteuid() != 0:
        pytest.skip(f"mounting a tmpfs needs root, this is uid {os.geteuid()}")
    mounted: list[Tmpfs] = []

    def mount(size_mib: int) -> Tmpfs:
        try:
            mounted.append(Tmpfs(tmp_path / f"tmpfs-{len(mounted)}", size_mib))
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine lets nobody mount a tmpfs: {error.stderr.strip()}")
        return mounted[-1]

    yield mount
    for tmpfs in mounted:
        tmpfs.unmount()
