"""One patch as text: names, tags, and line counts that agree with git's."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetap.patchstack.patchfile import FileChange, Patch, PatchFormatError, file_name
from stagetap.patchstack.series import Series
from unit.patchstack.synthetic import Commit, make_series


def test_a_patch_says_its_parts(series: Series) -> None:
    first, second, _ = series.patches
    assert first.name == "0001-hook-the-model-config.patch"
    assert first.subject == "Hook the model config"
    assert first.body.startswith("The reason.\n")
    assert first.tags["Origin"] == "vendor"
    assert first.changes == (
        FileChange("vllm/config/model.py", "modify", 1, 0),
        FileChange("vllm/envs.py", "modify", 1, 1),
    )
    assert (first.added, first.removed) == (2, 1)
    assert second.changes == (FileChange("vllm/stagetap_hooks.py", "create", 1, 0),)


def test_tags_go_over_several_lines_and_come_last(tmp_path: Path) -> None:
    tags = "Origin: vendor\nDescription: one\n two\n three\nForwarded: no"
    edits = {"vllm/envs.py": "Note: = 1\n"}
    (patch,) = make_series(tmp_path / "r", [Commit("Note: a subject", edits, tags)]).patches
    assert patch.tags == {"Origin": "vendor", "Description": "one two three", "Forwarded": "no"}


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        ("Hook the config", "0007-hook-the-config.patch"),
        ("[worker] V2: skip `take()`!", "0007-worker-v2-skip-take.patch"),
        ("Größe", "0007-gr-e.patch"),
    ],
)
def test_file_names_follow_from_subjects(subject: str, name: str) -> None:
    assert file_name(7, subject) == name


def test_a_subject_without_letters_has_no_file_name() -> None:
    with pytest.raises(PatchFormatError, match="subject"):
        file_name(1, "…")


@pytest.mark.parametrize("data", [b"", b"no patch\n", b"\xff\xfe", b"diff --git a/x b/x\n"])
def test_what_is_no_patch_is_said_to_be_none(data: bytes) -> None:
    with pytest.raises(PatchFormatError, match=r"0001-x\.patch"):
        _ = (Patch("0001-x.patch", data).changes, Patch("0001-x.patch", data).subject)


# Lines that look like parts of a diff, with and without a last newline.
_lines = st.sampled_from(
    ["a", "b", "", "--- a/vllm/x.py", "+++ b", "@@ -1 +1 @@", "diff --git a/x b/x"]
)
_texts = st.lists(_lines, max_size=12).map("\n".join)


@settings(max_examples=25, deadline=None)
@given(old=_texts, new=_texts)
def test_counts_are_those_of_git(old: str, new: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "old").write_text(old)
        (root / "new").write_text(new)
        numstat = _diff(root, "--numstat").split()
        if old == new:
            return
        patch = Patch("0001-x.patch", _diff(root))
    assert [str(patch.added).encode(), str(patch.removed).encode()] == numstat[:2]


def _diff(root: Path, *options: str) -> bytes:
    command = ["git", "diff", "--no-index", *options, "--", "old", "new"]
    return subprocess.run(command, cwd=root, capture_output=True).stdout
