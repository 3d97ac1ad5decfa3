"""A file system of a few MiB, to fill up or to make read-only."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


class Tmpfs:
    """A mounted tmpfs of a few MiB."""

    def __init__(self, path: Path, size_mib: int) -> None:
        self.path = path
        path.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "stagetap-test", str(path))

    def make_read_only(self) -> None:
        _run("mount", "-o", "remount,ro", str(self.path))

    def free_bytes(self) -> int:
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_bsize

    def unmount(self) -> None:
        _run("umount", "-l", str(self.path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


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
