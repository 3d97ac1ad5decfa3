"""The patches of one vLLM version in their order, and the lock that pins what they touch."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stagetap.errors import StageTapError
from stagetap.patchstack.patchfile import Patch

LOCK_FORMAT = 1
SERIES_FILE = "series"
LOCK_FILE = "lock.json"


class SeriesError(StageTapError):
    """A series folder that contradicts itself: the checkout or the installation is damaged."""


@dataclass(frozen=True)
class Pin:
    """sha256 of one touched file; ``before`` is None for a file that the series creates."""

    before: str | None
    after: str


@dataclass(frozen=True)
class Lock:
    """What the series was made for, and what each touched file is before and after it."""

    vllm_version: str
    series_sha256: str
    files: Mapping[str, Pin]

    def encode(self) -> bytes:
        """Deterministic JSON, one file a block, so that diffs of the lock can be read."""
        document = {
            "format": LOCK_FORMAT,
            "vllm_version": self.vllm_version,
            "series_sha256": self.series_sha256,
            "files": {
                path: {"before": pin.before, "after": pin.after}
                for path, pin in sorted(self.files.items())
            },
        }
        return (json.dumps(document, indent=2) + "\n").encode()


@dataclass(frozen=True)
class Series:
    """The patches in their order, with their lock."""

    patches: tuple[Patch, ...]
    lock: Lock

    @cached_property
    def digest(self) -> str:
        """sha256 of ``cat series 0001-*.patch 0002-*.patch ...``, in the order of the series."""
        return series_digest(self.patches)

    @property
    def version(self) -> str:
        """The vLLM version that the series is for."""
        return self.lock.vllm_version

    @property
    def paths(self) -> list[str]:
        """Every touched file, sorted."""
        return sorted(self.lock.files)


def series_text(names: Iterable[str]) -> bytes:
    """The ``series`` file: one patch name a line, in the order of application."""
    return "".join(f"{name}\n" for name in names).encode()


def series_digest(patches: Iterable[Patch]) -> str:
    """The digest that manifests and the lock carry; see Series.digest."""
    patches = tuple(patches)
    digest = hashlib.sha256(series_text(patch.name for patch in patches))
    for patch in patches:
        digest.update(patch.data)
    return digest.hexdigest()


def parse_series(text: bytes) -> list[str]:
    """Patch names in order; blank lines and ``#`` comments carry nothing.

    Raises SeriesError on a name that occurs twice or leaves the folder, and on other bytes than
    UTF-8.
    """
    names: list[str] = []
    try:
        lines = text.decode("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SeriesError(f"{SERIES_FILE} is not UTF-8: {error}") from error
    for raw in lines:
        name = raw.strip()
        if not name or name.startswith("#"):
            continue
        if name in names:
            raise SeriesError(f"series names {name} twice")
        if "/" in name or name.startswith("."):
            raise SeriesError(f"series names {name!r}, which is no file of this folder")
        names.append(name)
    return names


def decode_lock(data: bytes) -> Lock:
    """Raises SeriesError, naming the field, when the bytes are no lock of a known format."""
    try:
        document: dict[str, Any] = json.loads(data)
        if document["format"] != LOCK_FORMAT:
            raise SeriesError(f"{LOCK_FILE} has format {document['format']}, not {LOCK_FORMAT}")
        files = {
            path: Pin(before=pin["before"], after=pin["after"])
            for path, pin in document["files"].items()
        }
        return Lock(document["vllm_version"], document["series_sha256"], files)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise SeriesError(f"{LOCK_FILE} is damaged: {error!r}") from error


def read_series(folder: Path) -> Series:
    """Load the series of the vLLM that ``folder`` is called after.

    Raises SeriesError like ``load_series``, and for the series of another version.
    """
    try:
        series = load_series(folder)
        if series.version != folder.name:
            raise SeriesError(f"{LOCK_FILE} in {folder} is for vLLM {series.version}")
    except SeriesError as error:
        raise SeriesError(
            f"{error}; reinstall stagetap, or run `stagetap patch export` after changing patches"
        ) from error
    return series


def load_series(folder: Path) -> Series:
    """Load a series, whatever its folder is called.

    Raises SeriesError, naming the folder, when a file is missing or damaged, or when the patches
    are not those that the lock was made for: nothing must be applied that the lock's hashes do not
    answer for.
    """
    try:
        names = parse_series((folder / SERIES_FILE).read_bytes())
        patches = tuple(Patch(name, (folder / name).read_bytes()) for name in names)
        lock = decode_lock((folder / LOCK_FILE).read_bytes())
        touched = {change.path for patch in patches for change in patch.changes}
    except OSError as error:
        raise SeriesError(f"the patch series {folder} is incomplete: {error}") from error
    except (SeriesError, ValueError) as error:
        raise SeriesError(f"the patch series {folder} is damaged: {error}") from error
    series = Series(patches, lock)
    if series.digest != lock.series_sha256:
        raise SeriesError(f"the patches in {folder} are not those of its {LOCK_FILE}")
    if unlike := sorted(touched ^ lock.files.keys()):
        held = "patched but not in it" if unlike[0] in touched else "in it but not patched"
        raise SeriesError(f"{LOCK_FILE} in {folder} is not of its patches: {unlike[0]} is {held}")
    for path in touched:
        if not path.startswith("vllm/") or ".." in path.split("/"):
            raise SeriesError(f"the patch series {folder} touches {path}, no file of vLLM")
    return series


def has_lock(folder: Path) -> bool:
    """Whether ``write_series`` got to its end in this folder."""
    return (folder / LOCK_FILE).exists()


def write_series(series: Series, folder: Path) -> None:
    """Write ``series``, the patches and, last, the lock; remove patches that are not named."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [patch.name for patch in series.patches]
    for stale in set(folder.glob("*.patch")) - {folder / name for name in names}:
        stale.unlink()
    for patch in series.patches:
        _write_changed(folder / patch.name, patch.data)
    _write_changed(folder / SERIES_FILE, series_text(names))
    _write_changed(folder / LOCK_FILE, series.lock.encode())


def sha256(data: bytes | None) -> str | None:
    """Hash of a file's bytes; an absent file (None) has none."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def _write_changed(path: Path, data: bytes) -> None:
    """Leave equal files alone, so that an export without changes touches nothing."""
    if not path.exists() or path.read_bytes() != data:
        staged = path.with_name(f".{path.name}.new")
        with staged.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
