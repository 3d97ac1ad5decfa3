"""A series in another release: what applies, what moved, what merges, conflicts or is absorbed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from stagetap.errors import Refused
from stagetap.patchstack import operations
from stagetap.patchstack.drift import describe, drift_rows, measure_drift, render_drift
from stagetap.patchstack.lint import lint_series
from stagetap.patchstack.rebase import Carried, carry_over, finish_rebase, start_rebase
from stagetap.patchstack.series import Series, write_series
from stagetap.patchstack.tree import patched_contents
from stagetap.patchstack.workshop import export_repository
from unit.patchstack.synthetic import PRISTINE, make_package

NEXT = "0.33.0"
_NEXT_VERSION = {"vllm/_version.py": b"__version__ = version = '0.33.0'\n"}


def _next(changes: Mapping[str, tuple[str, str]], without: str = "") -> dict[str, bytes]:
    """The next release: lines replaced in some files, and perhaps a file less."""
    files = {path: data for path, data in PRISTINE.items() if path != without} | _NEXT_VERSION
    for path, (old, new) in changes.items():
        text = files[path].decode()
        assert old in text
        files[path] = text.replace(old, new, 1).encode()
    return files


def _carry(
    folder: Path, series: Series, release: Mapping[str, bytes]
) -> tuple[list[Carried], Series]:
    start_rebase(folder, PRISTINE, series)
    carried = list(carry_over(folder, series, release, NEXT))
    finish_rebase(folder)
    return carried, export_repository(folder)


def test_equal_files_take_every_patch_as_it_is(tmp_path: Path, series: Series) -> None:
    carried, rebased = _carry(tmp_path / "r", series, _next({}))
    assert [one.fate for one in carried] == ["applies"] * 3
    assert [patch.data for patch in rebased.patches] == [patch.data for patch in series.patches]
    assert rebased.version == NEXT
    assert rebased.lock.files == series.lock.files


def test_moved_lines_give_an_offset_and_a_series_that_applies(
    tmp_path: Path, series: Series
) -> None:
    release = _next({"vllm/config/model.py": ("# model\n", "# model\n# one\n# two\n")})
    carried, rebased = _carry(tmp_path / "r", series, release)
    assert [(one.fate, one.offset) for one in carried] == [
        ("offset", 2),
        ("applies", 0),
        ("offset", 2),
    ]
    assert lint_series(rebased) == []
    after = patched_contents({**release, "vllm/stagetap_hooks.py": None}, rebased)
    assert b"# two\nline_0 = 0" in (after["vllm/config/model.py"] or b"")
    assert b"hook = 2" in (after["vllm/config/model.py"] or b"")


def test_changed_context_merges_where_an_exact_application_fails(
    tmp_path: Path, series: Series
) -> None:
    release = _next({"vllm/config/model.py": ("line_1 = 1\n", "line_1 = 111\n")})
    carried, rebased = _carry(tmp_path / "r", series, release)
    assert [one.fate for one in carried] == ["merges", "applies", "merges"]
    assert not any(one.conflicts for one in carried)
    patched_contents({**release, "vllm/stagetap_hooks.py": None}, rebased)


def test_a_hook_whose_lines_occur_twice_stays_in_its_place(tmp_path: Path, series: Series) -> None:
    """git apply takes the nearest place with the same lines; a merge knows what stands above."""
    lines = "".join(f"line_{number} = {number}\n" for number in range(7))
    release = _next({"vllm/config/model.py": ("# model\n", lines + "# above\n# model\n")})
    carried, rebased = _carry(tmp_path / "r", series, release)
    after = patched_contents({**release, "vllm/stagetap_hooks.py": None}, rebased)
    head, _, tail = (after["vllm/config/model.py"] or b"").partition(b"# above\n")
    assert b"hook" not in head
    assert b"hook = 2" in tail
    assert carried[0].fate == "merges", "an exact application exists, and is not trusted"


def test_what_upstream_took_is_absorbed_and_leaves_the_series(
    tmp_path: Path, series: Series
) -> None:
    release = _next({}) | {"vllm/stagetap_hooks.py": b"HOOKS = []\n"}
    carried, rebased = _carry(tmp_path / "r", series, release)
    assert [(one.fate, one.added) for one in carried] == [
        ("applies", 2),
        ("absorbed", 0),
        ("applies", 2),
    ]
    assert [patch.name for patch in rebased.patches] == [
        "0001-hook-the-model-config.patch",
        "0002-hook-the-config-again.patch",
    ]


def test_a_patch_that_upstream_took_half_of_has_fewer_lines_left(
    tmp_path: Path, series: Series
) -> None:
    release = _next({"vllm/envs.py": ("line_20 = 20\n", "line_20 = 21\n")})
    carried, _ = _carry(tmp_path / "r", series, release)
    assert (carried[0].fate, carried[0].added, carried[0].removed) == ("merges", 1, 0)


_CONFLICTING = {"vllm/config/model.py": ("line_3 = 3\nline_4 = 4\n", "line_3 = 33\nline_4 = 44\n")}


class TestConflicts:
    def test_they_are_marked_listed_and_later_patches_go_on(
        self, tmp_path: Path, series: Series
    ) -> None:
        carried, rebased = _carry(tmp_path / "r", series, _next(_CONFLICTING))
        assert carried[0].fate == "conflicts"
        assert carried[0].conflicts == {"vllm/config/model.py": 1}
        assert carried[1].fate == "applies"
        first = rebased.patches[0]
        assert first.conflicted
        assert b"+>>>>>>> 0001-hook-the-model-config.patch\n" in first.data
        assert b"+line_20 = 21\n" in first.data, "what merges of the patch is carried over"

    def test_the_result_is_the_same_every_time(self, tmp_path: Path, series: Series) -> None:
        results = [_carry(tmp_path / name, series, _next(_CONFLICTING))[1] for name in "ab"]
        assert results[0] == results[1]

    def test_nobody_can_apply_it(self, tmp_path: Path, series: Series) -> None:
        release = _next(_CONFLICTING)
        _, rebased = _carry(tmp_path / "r", series, release)
        write_series(rebased, tmp_path / "patches/vllm" / NEXT)
        package = make_package(tmp_path / "site", release)
        for operation in (operations.apply, operations.status, operations.verify):
            with pytest.raises(Refused, match=r"is not finished: 0001-.* has conflict markers"):
                operation(package, tmp_path / "patches")
        assert any("carries conflict markers" in finding for finding in lint_series(rebased))

    def test_a_file_that_is_gone_is_a_conflict_of_its_own(
        self, tmp_path: Path, series: Series
    ) -> None:
        carried, rebased = _carry(tmp_path / "r", series, _next({}, without="vllm/envs.py"))
        assert carried[0].conflicts == {"vllm/envs.py": 0}
        assert "vllm/envs.py" not in rebased.lock.files

    def test_a_file_under_another_name_is_followed(self, tmp_path: Path, series: Series) -> None:
        release = _next({}, without="vllm/config/model.py")
        release["vllm/config/models.py"] = PRISTINE["vllm/config/model.py"]
        carried, rebased = _carry(tmp_path / "r", series, release)
        assert not any(one.conflicts for one in carried)
        assert "vllm/config/models.py" in rebased.lock.files


class TestDrift:
    def test_versions_are_measured_from_one_start(self, series: Series) -> None:
        releases = {
            "0.33.0": _next({"vllm/config/model.py": ("# model\n", "# model\n# one\n")}),
            "0.34.0": _next(_CONFLICTING) | {"vllm/stagetap_hooks.py": b"HOOKS = []\n"},
            "0.31.0": dict(PRISTINE),
        }
        said: list[str] = []
        drift = measure_drift(series, PRISTINE, releases, releases.__getitem__, said.append)
        assert [[one.fate for one in column] for column in drift.values()] == [
            ["offset", "applies", "offset"],
            ["conflicts", "absorbed", drift["0.34.0"][2].fate],
            ["applies", "applies", "applies"],
        ]
        assert said[0] == "vLLM 0.33.0"
        rows = drift_rows(drift)
        assert rows[0][:2] == ["0001-hook-the-model-config", "offset 1, +2 -1 left"]
        assert rows[0][2] == "conflicts (1), +2 -1 left"
        assert rows[1][2] == "absorbed"
        table = render_drift(series, drift)
        assert table.splitlines()[0] == "| patch of 0.32.0 | 0.33.0 | 0.34.0 | 0.31.0 |"
        assert table.splitlines()[-1].startswith("| **all: +5 -2** | +5 -2 left |")

    def test_a_cell_says_what_is_left(self) -> None:
        gone = Carried("0001-a.patch", "conflicts", 0, {"vllm/a.py": 0, "vllm/b.py": 2}, 3, 1)
        assert describe(gone) == "conflicts (3), +3 -1 left"
        assert gone.document()["conflicts"] == {"vllm/a.py": 0, "vllm/b.py": 2}
