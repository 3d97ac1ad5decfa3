"""Every rule of the series can fire, and the shipped series keeps them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from stagetap.patchstack.lint import (
    lint_folder,
    lint_listing,
    lint_patch,
    lint_readme,
    lint_round_trip,
    lint_series,
)
from stagetap.patchstack.locate import patches_root, pinned_versions
from stagetap.patchstack.patchfile import Patch
from stagetap.patchstack.series import Pin, Series, read_series, series_digest, write_series
from unit.patchstack.synthetic import PRISTINE, TAGS, VERSION, Commit, make_series


def _pristine(series: Series) -> dict[str, bytes | None]:
    return {path: PRISTINE.get(path) for path in series.paths}


def _folder(root: Path, series: Series) -> Path:
    write_series(series, root / VERSION)
    return root / VERSION


def test_a_good_series_has_no_findings(tmp_path: Path, series: Series) -> None:
    assert lint_folder(_folder(tmp_path, series)) == []
    assert lint_round_trip(series, _pristine(series)) == []


@pytest.mark.parametrize("version", pinned_versions(patches_root()))
def test_the_shipped_series_has_no_findings(version: str) -> None:
    assert lint_folder(patches_root() / "vllm" / version) == []


def test_the_shipped_readme_says_the_numbers() -> None:
    root = patches_root()
    shipped = [read_series(root / "vllm" / version) for version in pinned_versions(root)]
    assert lint_readme((root / "README.md").read_text("utf-8"), shipped) == []


def test_a_stale_readme_is_found(series: Series) -> None:
    stale = "<!-- table: begin -->\n| 0001 | 1 |\n<!-- table: end -->\n"
    assert "just patch-table" in lint_readme(stale, [series])[0]


def test_the_folder_holds_what_the_series_names() -> None:
    found = lint_listing(
        ["series", "lock.json", "0001-a.patch", "notes"], ["0001-a.patch", "0002-b.patch"]
    )
    assert found == [
        "0002-b.patch is missing from the folder",
        "notes is in the folder but not in series",
    ]


def _tags_without(tag: str) -> str:
    return "\n".join(line for line in TAGS.splitlines() if not line.startswith(f"{tag}:"))


_HOOK = {"vllm/envs.py": ("line_1 = 1\n", "line_1 = 1\nhook = 1\n")}
_COMMITS: dict[str, Commit] = {
    f"lacks the DEP-3 tag {tag}": Commit("Hook", _HOOK, _tags_without(tag))
    for tag in ("Description", "Origin", "Forwarded", "Applied-Upstream", "Last-Update")
} | {
    "Forwarded is 'soon'": Commit("Hook", _HOOK, TAGS.replace("Forwarded: no", "Forwarded: soon")),
    "Last-Update is 'today'": Commit("Hook", _HOOK, TAGS.replace("2026-01-31", "today")),
    "vllm/_version.py differs between the builds": Commit("Hook", {"vllm/_version.py": "x = 1\n"}),
    "vllm/platforms/__init__.py differs": Commit("Hook", {"vllm/platforms/__init__.py": "x\n"}),
    "vllm/notes.txt is no Python module": Commit("Hook", {"vllm/notes.txt": "x\n"}),
    "tests/test_x.py is no Python module": Commit("Hook", {"tests/test_x.py": "x\n"}),
    "the series adds 301 lines, 300 at most": Commit("Hook", {"vllm/big.py": "x = 1\n" * 301}),
}


@pytest.mark.parametrize("finding", _COMMITS)
def test_each_rule_about_commits_fires(tmp_path: Path, finding: str) -> None:
    found = lint_series(make_series(tmp_path / "r", [_COMMITS[finding]]))
    assert len(found) == 1
    assert finding in found[0]


_EDITS: dict[str, Callable[[bytes], bytes]] = {
    "zero commit id": lambda data: data.replace(b"From 0000", b"From 1234", 1),
    "blob ids are abbreviated": lambda data: _abbreviate(data),
    "signature": lambda data: data + b"-- \n2.39.5\n",
    "carriage returns": lambda data: data.replace(b"+hook = 1\n", b"+hook = 1\r\n"),
    "no `Subject: [PATCH]": lambda data: data.replace(b"[PATCH] ", b""),
    "longer than 72 characters": lambda data: data.replace(b"[PATCH] ", b"[PATCH] " + b"x" * 72),
    "vllm/envs.py is deleted": lambda data: data.replace(
        b"diff --git a/vllm/envs.py b/vllm/envs.py\n",
        b"diff --git a/vllm/envs.py b/vllm/envs.py\nold mode 100644\nnew mode 100755\n",
    ),
    "model.py is deleted, renamed, binary, a link": lambda data: data.replace(
        b" 100644", b" 120000"
    ),
}


def _abbreviate(data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    return b"".join(
        b"index 1234567..89abcde 100644\n" if line.startswith(b"index ") else line for line in lines
    )


@pytest.mark.parametrize("finding", _EDITS)
def test_each_rule_about_the_form_fires(series: Series, finding: str) -> None:
    edited = Patch(series.patches[0].name, _EDITS[finding](series.patches[0].data))
    assert finding in "\n".join(lint_patch(edited))


def test_a_wrong_name_is_found(series: Series) -> None:
    turned = (series.patches[1], series.patches[0], series.patches[2])
    found = lint_series(Series(turned, series.lock))
    assert (
        "0002-add-a-module-of-hooks.patch should be called 0001-add-a-module-of-hooks.patch"
        in found
    )


def test_a_file_that_the_series_leaves_as_it_is_is_found(series: Series) -> None:
    files = {**series.lock.files, "vllm/envs.py": Pin("0" * 64, "0" * 64)}
    found = lint_series(Series(series.patches, replace(series.lock, files=files)))
    assert found == ["vllm/envs.py is the same before and after the series"]


def test_an_edited_patch_does_not_pass_as_locked(tmp_path: Path, series: Series) -> None:
    folder = _folder(tmp_path, series)
    patch = folder / series.patches[0].name
    patch.write_bytes(patch.read_bytes().replace(b"hook = 1", b"hook = 8"))
    assert "are not those of its lock.json" in lint_folder(folder)[0]


def test_a_lock_for_another_version_is_found(tmp_path: Path, series: Series) -> None:
    write_series(series, tmp_path / "0.33.0")
    (found,) = lint_folder(tmp_path / "0.33.0")
    assert found.startswith(f"0.33.0: lock.json in {tmp_path}/0.33.0 is for vLLM 0.32.0; reinstall")


def test_an_unreadable_folder_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / VERSION).mkdir()
    assert len(lint_folder(tmp_path / VERSION)) == 1


class TestRoundTrip:
    def _relocked(self, series: Series, patches: list[Patch]) -> Series:
        lock = replace(series.lock, series_sha256=series_digest(patches))
        return Series(tuple(patches), lock)

    def test_a_patch_written_by_hand_differs_when_regenerated(self, series: Series) -> None:
        first = series.patches[0]
        edited = Patch(first.name, first.data.replace(b"The reason.\n", b"The reason.  \n"))
        changed = self._relocked(series, [edited, *series.patches[1:]])
        found = lint_round_trip(changed, _pristine(series))
        assert len(found) == 1
        assert f"{first.name} differs when regenerated" in found[0]

    def test_a_patch_that_does_not_apply_is_named(self, series: Series) -> None:
        pristine = _pristine(series) | {"vllm/envs.py": b"another release\n"}
        assert (
            "0001-hook-the-model-config.patch does not apply"
            in lint_round_trip(series, pristine)[0]
        )

    def test_a_wrong_lock_is_found(self, series: Series) -> None:
        pins = {
            **series.lock.files,
            "vllm/envs.py": Pin("0" * 64, series.lock.files["vllm/envs.py"].after),
        }
        found = lint_round_trip(
            Series(series.patches, replace(series.lock, files=pins)), _pristine(series)
        )
        assert len(found) == 1
        assert f"{VERSION}: lock.json differs when regenerated" in found[0]

    def test_a_result_that_does_not_compile_is_found(self, tmp_path: Path) -> None:
        broken = make_series(tmp_path / "r", [Commit("Hook", {"vllm/envs.py": "def (:\n"})])
        found = lint_round_trip(broken, _pristine(broken))
        assert len(found) == 1
        assert f"{VERSION}: vllm/envs.py does not compile" in found[0]
