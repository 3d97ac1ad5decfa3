"""A file system of a few MiB, to fill up or to make read-only."""

import os
import subprocess
from pathlib import Path


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
