"""Folders and files that a command makes: where that fails, the path and the cure are named."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagetap.cli.interrupt import termination_interrupts
from stagetap.stores.file_io import naming


def make_folder(path: Path) -> None:
    """Make a folder and those above it; one that is there is as good. Raises StoreError."""
    with naming("create", str(path)):
        path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Write a whole file. Raises StoreError."""
    data = content.encode() if isinstance(content, str) else content
    with naming("write", str(path), len(data)):
        path.write_bytes(data)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """An empty folder in ``TMPDIR``, removed at the end, which SIGTERM brings about as well.

    Raises StoreError where it cannot be made.
    """
    with termination_interrupts():
        with naming("create a temporary folder", prefix):
            folder = tempfile.TemporaryDirectory(prefix=prefix)
        with folder as name:
            yield Path(name)
