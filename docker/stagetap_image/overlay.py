"""The files that the image has and its base has not, below one folder that is copied onto it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path


def copy_overlay(files: Iterable[Path], overlay: Path) -> int:
    """Put each of the absolute paths at the same place below ``overlay``; return their bytes.

    Modes and times are kept, so that bytecode stays valid; folders look as those of the base do,
    since copying them onto it would else change these.
    """
    size_bytes = 0
    for file in sorted(set(files)):
        real = file.parent.resolve() / file.name
        target = overlay / real.relative_to("/")
        _make_folders(real.parent, target.parent)
        shutil.copy2(real, target, follow_symlinks=False)
        size_bytes += target.lstat().st_size
    return size_bytes


def _make_folders(real: Path, target: Path) -> None:
    if target.is_dir():
        return
    if real != real.parent:
        _make_folders(real.parent, target.parent)
    target.mkdir(exist_ok=True)
    shutil.copystat(real, target)
