"""In what state the touched files of a package are, and what they were before any series.

A file is judged by its hash alone, each on its own. Since files are replaced one atomic rename
at a time, a process killed half-way leaves a mixture of known files: `partial`, from which both
apply and revert go on. There is no journal to lose.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from stagetap.errors import Refused
from stagetap.patchstack.gitrun import Contents, apply_patches, read_file
from stagetap.patchstack.locate import Package
from stagetap.patchstack.series import Series, sha256

FileState = Literal["pristine", "applied", "outdated", "missing", "unknown"]
State = Literal["applied", "pristine", "outdated", "partial", "foreign"]

FOREIGN: dict[FileState, str] = {
    "missing": "is missing",
    "unknown": "has contents that no series knows",
}


def touched_paths(known: Iterable[Series]) -> list[str]:
    """Every file that one of the series touches, sorted."""
    return sorted({path for series in known for path in series.paths})


def read_touched(package: Package, known: Iterable[Series]) -> Contents:
    """The present bytes of every file that one of the series touches.

    Raises Refused for a folder in the place of one, or another thing that cannot be read.
    """
    try:
        return {path: read_file(package.file(path)) for path in touched_paths(known)}
    except OSError as error:
        raise Refused(
            f"{error.filename} cannot be read: {error.strerror}; reinstall vLLM {package.version}"
        ) from error


def file_states(files: Contents, wanted: Series, known: Sequence[Series]) -> dict[str, FileState]:
    """The state of each file for ``wanted``; ``known`` are all series that may be applied."""
    return {path: _file_state(path, data, wanted, known) for path, data in files.items()}


def _file_state(
    path: str, data: bytes | None, wanted: Series, known: Sequence[Series]
) -> FileState:
    found = sha256(data)
    pin = wanted.lock.files.get(path)
    if pin is not None and found == pin.after:
        return "applied"
    pins = [series.lock.files[path] for series in known if path in series.lock.files]
    if any(found == other.before for other in pins):
        return "pristine"
    if any(found == other.after for other in pins):
        return "outdated"
    return "missing" if found is None else "unknown"


def overall_state(states: Mapping[str, FileState], wanted: Series) -> State:
    """One word for the package; an empty series is always applied."""
    expected: dict[str, FileState] = {
        path: "applied" if path in wanted.lock.files else "pristine" for path in states
    }
    if not FOREIGN.keys().isdisjoint(states.values()):
        return "foreign"
    if states == expected:
        return "applied"
    present = set(states.values())
    if present == {"pristine"}:
        return "pristine"
    return "outdated" if "outdated" in present else "partial"


def first_foreign(states: Mapping[str, FileState]) -> str | None:
    """``FILE is missing`` or the like for the first file that no series knows, else None."""
    for path, state in sorted(states.items()):
        if state in FOREIGN:
            return f"{path} {FOREIGN[state]}"
    return None


def pristine_contents(files: Contents, known: Sequence[Series]) -> Contents:
    """What each file was before any series: itself, or its patches of a known series undone.

    ``files`` must hold nothing foreign. Raises Refused when undoing gives an unexpected file.
    """
    pristine = {path: files[path] for path in sorted(files)}
    for series in known:
        patched = {
            path: data
            for path, data in files.items()
            if path in series.lock.files and sha256(data) == series.lock.files[path].after
        }
        for path, data in apply_patches(series.patches, patched, reverse=True).items():
            if sha256(data) != series.lock.files[path].before:
                raise Refused(f"{path}: undoing the series does not give what it was made for")
            pristine[path] = data
    return pristine


def compile_error(path: str, data: bytes | None) -> str | None:
    """``FILE does not compile: why``, or None for one that does, or that is not there."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of vLLM's own lines
            compile(data or b"", path, "exec")
    except (SyntaxError, ValueError) as error:  # the latter: a byte 0
        return f"{path} does not compile: {error}"
    return None


def patched_contents(pristine: Contents, series: Series) -> Contents:
    """The touched files after the whole series.

    Raises Refused when a result is not what the lock says, PatchDoesNotApply when none comes out.
    """
    before = {path: pristine[path] for path in series.paths}
    after = apply_patches(series.patches, before)
    for path in series.paths:
        if sha256(after[path]) != series.lock.files[path].after:
            raise Refused(f"{path}: the series gives another file than its lock says")
    return after
