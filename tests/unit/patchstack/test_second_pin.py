"""vLLM 0.33.0: its series is the one of 0.32.0 carried over, with three conflicts resolved by hand.

Needs the wheel of 0.33.0, which is downloaded once into the user's cache.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stagetap.patchstack import operations
from stagetap.patchstack.drift import describe
from stagetap.patchstack.gitrun import Contents, read_file, write_files
from stagetap.patchstack.lint import lint_round_trip
from stagetap.patchstack.locate import find_vllm, patches_root
from stagetap.patchstack.patchfile import Patch
from stagetap.patchstack.rebase import carry_over, finish_rebase, start_rebase
from stagetap.patchstack.releases import Unreachable, default_cache
from stagetap.patchstack.series import read_series
from stagetap.patchstack.sources import pristine_files, released_files
from stagetap.patchstack.tree import patched_contents
from stagetap.patchstack.workshop import export_repository

pytestmark = pytest.mark.full

FIRST, SECOND = "0.32.0", "0.33.0"
CONFLICTS = {
    "0005-plugins-hook-point-for-the-finished-configuration.patch": {"vllm/config/vllm.py": 1},
    "0010-plugins-hook-point-for-an-engine-that-shuts-down.patch": {"vllm/v1/engine/core.py": 1},
}
MOVED = {
    "0012-kv-cache-hidden-state-layers-share-blocks.patch": {"vllm/v1/core/kv_cache_utils.py": 1}
}
"""The function went to another file, and the same change with it."""
IMPORTED = {
    "0013-kv-cache-hidden-states-change-no-prefill-step.patch": [b"+    HiddenStateCacheSpec,"]
}
"""What a patch has to import in the second release, and finds imported in the first."""
_MARKED = re.compile(rb"^<<<<<<< .*\n((?:.*\n)*?)=======\n((?:.*\n)*?)>>>>>>> .*\n", re.MULTILINE)


@pytest.fixture(scope="module")
def second() -> Contents:
    try:
        return released_files(SECOND, default_cache())
    except Unreachable as error:
        pytest.skip(str(error))


def _changes(patch: Patch) -> bytes:
    """A patch without its message: DEP-3 tags say where each release stands."""
    return patch.data[patch.data.index(b"\ndiff --git ") :]


def _lines(patch: Patch) -> list[bytes]:
    """What a patch adds and takes away, wherever that is."""
    hunks = patch.data[patch.data.index(b"\n@@ ") :].splitlines()
    return [line for line in hunks if line[:1] in (b"+", b"-")]


def test_the_second_series_is_the_first_one_carried_over(tmp_path: Path, second: Contents) -> None:
    if find_vllm().version != FIRST:
        pytest.skip(f"the vLLM that runs the tests is not {FIRST}")
    first = read_series(patches_root() / "vllm" / FIRST)
    shipped = read_series(patches_root() / "vllm" / SECOND)
    start_rebase(tmp_path / "r", pristine_files(), first)
    carried = list(carry_over(tmp_path / "r", first, second, SECOND))
    finish_rebase(tmp_path / "r")
    rebased = export_repository(tmp_path / "r")
    assert {one.patch: one.conflicts for one in carried if one.conflicts} == CONFLICTS | MOVED
    assert not any(one.fate == "absorbed" for one in carried)
    page = (Path(__file__).parents[3] / "docs/patches.md").read_text("utf-8")
    for one in carried:
        assert f"| {one.patch.removesuffix('.patch')} | {describe(one)} |" in page
    for one, ours, theirs in zip(carried, rebased.patches, shipped.patches, strict=True):
        assert ours.name == theirs.name
        if one.patch in MOVED:
            (written,) = (each for each in first.patches if each.name == one.patch)
            assert _lines(theirs) == _lines(written)
        elif one.patch in IMPORTED:
            assert _lines(theirs) == IMPORTED[one.patch] + _lines(ours)
        elif one.patch not in CONFLICTS:
            assert _changes(ours) == _changes(theirs)
    # Both sides of the marked lines, one after the other, are what the shipped series has.
    for path in (path for paths in CONFLICTS.values() for path in paths):
        resolved = _MARKED.sub(rb"\1\2", (tmp_path / "r" / path).read_bytes())
        pristine = {name: second.get(name) for name in shipped.paths}
        assert resolved == patched_contents(pristine, shipped)[path]


def test_the_second_series_applies_compiles_and_regenerates(second: Contents) -> None:
    series = read_series(patches_root() / "vllm" / SECOND)
    pristine = {path: second.get(path) for path in series.paths}
    assert lint_round_trip(series, pristine) == []
    for path, data in patched_contents(pristine, series).items():
        assert data is not None
        compile(data, path, "exec")


def test_an_installed_second_pin_is_patched_and_given_back(
    tmp_path: Path, second: Contents
) -> None:
    series = read_series(patches_root() / "vllm" / SECOND)
    paths = [*series.paths, "vllm/__init__.py", "vllm/_version.py", "vllm/plugins/__init__.py"]
    files = {path: second.get(path) for path in paths}
    write_files(tmp_path, files)
    applied = operations.apply(tmp_path)
    assert (applied.state, applied.series.digest) == ("applied", series.digest)
    assert operations.verify(tmp_path).state == "applied"
    operations.revert(tmp_path)
    assert {path: read_file(tmp_path / path) for path in paths} == files
