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
from stagetap.patchstack.series import Series, SeriesError, has_lock, load_series, write_series

_FOLDER = ".stagetap"


def read_records(package: Package) -> list[Series]:
    """The recorded series for this vLLM version. Raises SeriesError on a damaged record."""
    # The lock is written last: a record without it is of a run that was killed before it changed
    # anything. Any other record that cannot be read may be the only key to the files as they are.
    complete = (folder for folder in sorted(_root(package).glob("*")) if has_lock(folder))
    try:
        records = [load_series(folder) for folder in complete]
    except SeriesError as error:
        raise SeriesError(f"{error}; reinstall vLLM {package.version}") from error
    return [series for series in records if series.version == package.version]


def is_only_record(package: Package, series: Series | None) -> bool:
    """Whether the package carries the record of ``series`` alone, or none at all for None."""
    wanted = [] if series is None else [_folder(package, series)]
    complete = {_folder(package, record) for record in read_records(package)}
    return list(_root(package).glob("*")) == wanted and complete == set(wanted)


@contextlib.contextmanager
def recorded(package: Package, series: Series | None) -> Iterator[None]:
    """Record ``series`` while the body puts its files in place.

    The older records stay, so that a mixture of old and new files can be told; ``keep_only``
    removes them afterwards. When the body raises, the records are what they were.
    """
    root = _root(package)
    before = set(root.glob("*"))
    try:
        if series is not None:
            write_series(series, _folder(package, series))
        yield
    except BaseException:
        _remove(root, set(root.glob("*")) - before)
        raise


def keep_only(package: Package, series: Series | None) -> None:
    """Forget every record but that of ``series``; all of them for None."""
    keep = set() if series is None else {_folder(package, series)}
    _remove(_root(package), set(_root(package).glob("*")) - keep)


def _remove(root: Path, entries: Iterable[Path]) -> None:
    for entry in entries:
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()  # a file manager's, since ours are folders
    if root.exists() and not any(root.iterdir()):
        root.rmdir()


def _root(package: Package) -> Path:
    return package.path / _FOLDER


def _folder(package: Package, series: Series) -> Path:
    return _root(package) / series.digest[:16]
