"""Which series was applied to a package: a copy of it, kept inside the package.

With it a newer StageTap can undo an older series before applying its own; without it a changed
series would make the package look foreign. A record is believed only where the hashes of its
lock match the files, so one that outlived a reinstallation does no harm.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from stagetap.patchstack.locate import Package
from stagetap.patchstack.series import Series, SeriesError, read_series, write_series

_FOLDER = ".stagetap"


def read_records(package: Package) -> list[Series]:
    """The recorded series for this vLLM version; what cannot be read is as good as absent."""
    records = []
    for folder in sorted(_root(package).glob("*")):
        try:
            series = read_series(folder)
        except SeriesError:
            continue  # a record whose writer was killed: nothing was applied from it yet
        if series.version == package.version:
            records.append(series)
    return records


def is_only_record(package: Package, series: Series | None) -> bool:
    """Whether the package carries the record of ``series`` alone, or none at all for None."""
    wanted = [] if series is None else [_folder(package, series)]
    complete = {_folder(package, record) for record in read_records(package)}
    return list(_root(package).glob("*")) == wanted and complete == set(wanted)


@contextlib.contextmanager
def recorded(package: Package, series: Series | None) -> Iterator[None]:
    """Record ``series`` before its first file is put in place, forget all others after the last.

    In between both the old series and the new one are on record, so that a mixture of their
    files can be told. When the body raises, the records are what they were.
    """
    root = _root(package)
    before = set(root.glob("*"))
    keep = None if series is None else _folder(package, series)
    try:
        if series is not None and keep is not None:
            write_series(series, keep)
        yield
    except BaseException:
        _remove(root, set(root.glob("*")) - before)
        raise
    _remove(root, set(root.glob("*")) - {keep})


def _remove(root: Path, folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder)
    if root.exists() and not any(root.iterdir()):
        root.rmdir()


def _root(package: Package) -> Path:
    return package.path / _FOLDER


def _folder(package: Package, series: Series) -> Path:
    return _root(package) / series.digest[:16]
