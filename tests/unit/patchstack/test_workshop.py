"""Series -> repository -> series, byte for byte, whatever the user's git is set to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.patchstack.gitrun import GitError, PatchDoesNotApply, apply_patches, git
from stagetap.patchstack.patchfile import Patch
from stagetap.patchstack.series import Series, sha256
from stagetap.patchstack.tree import patched_contents
from stagetap.patchstack.workshop import (
    build_repository,
    export_repository,
)
from unit.patchstack.synthetic import (
    COMMITS,
    PRISTINE,
    Commit,
    add_commit,
    empty_series,
    make_series,
)


def test_the_round_trip_is_the_identity(tmp_path: Path, series: Series) -> None:
    build_repository(tmp_path / "again", PRISTINE, series)
    assert export_repository(tmp_path / "again") == series


def test_the_lock_pins_what_the_patches_do(series: Series) -> None:
    assert series.paths == ["vllm/config/model.py", "vllm/envs.py", "vllm/stagetap_hooks.py"]
    assert series.lock.files["vllm/stagetap_hooks.py"].before is None
    for path, data in patched_contents(
        {**PRISTINE, "vllm/stagetap_hooks.py": None}, series
    ).items():
        assert sha256(data) == series.lock.files[path].after
        assert sha256(PRISTINE.get(path)) == series.lock.files[path].before


def test_the_users_settings_change_nothing(
    tmp_path: Path, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".gitconfig").write_text(
        "[diff]\nnoprefix = true\nalgorithm = histogram\ncontext = 9\nrenames = copies\n"
        "[format]\nsignature = mine\nattach = true\nsubjectPrefix = MINE\nnumbered = true\n"
        "[apply]\nwhitespace = fix\n[core]\nautocrlf = true\nabbrev = 7\n[user]\nname = Me\n"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    assert make_series(tmp_path / "mine") == series


def test_a_temporary_folder_inside_a_repository_does_no_harm(
    tmp_path: Path, series: Series, monkeypatch: pytest.MonkeyPatch
) -> None:
    """git apply inside a repository skips files silently; ours never thinks it is in one."""
    git("init", "--quiet", cwd=tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pristine = {**PRISTINE, "vllm/stagetap_hooks.py": None}
    after = patched_contents(pristine, series)
    back = apply_patches(series.patches, after, reverse=True)
    assert back == {path: pristine[path] for path in series.paths}


def test_one_file_goes_through_the_series_alone(series: Series) -> None:
    path = "vllm/config/model.py"
    after = apply_patches(series.patches, {path: PRISTINE[path]})
    assert list(after) == [path]
    assert sha256(after[path]) == series.lock.files[path].after


def test_context_must_match_exactly(series: Series) -> None:
    """One changed line of context: patch would take it with fuzz, we do not."""
    path = "vllm/config/model.py"
    near = PRISTINE[path].replace(b"line_1 = 1\n", b"line_1 = 111\n")
    with pytest.raises(PatchDoesNotApply, match=r"^0001-hook-the-model-config\.patch does not"):
        apply_patches(series.patches, {path: near})


def test_a_patch_that_git_does_not_take_is_named(tmp_path: Path, series: Series) -> None:
    torn = Patch("0001-torn.patch", b"no mail\n")
    with pytest.raises(
        GitError, match=r"0001-torn\.patch: git am does not take it: Patch is empty\.$"
    ):
        build_repository(tmp_path / "r", PRISTINE, Series((torn,), series.lock))


def test_byte_code_is_no_uncommitted_work(tmp_path: Path) -> None:
    series = make_series(tmp_path / "r")
    (tmp_path / "r/vllm/__pycache__").mkdir()
    (tmp_path / "r/vllm/__pycache__/envs.cpython-311.pyc").write_bytes(b"")
    assert export_repository(tmp_path / "r") == series


def test_a_deleted_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    make_series(folder)
    git("rm", "--quiet", "vllm/envs.py", cwd=folder)
    git("commit", "--quiet", "-m", "Drop", cwd=folder)
    with pytest.raises(Refused, match=r"vllm/envs\.py is deleted"):
        export_repository(folder)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(Refused, match="is not empty"):
        build_repository(tmp_path, PRISTINE, empty_series())


def test_amending_keeps_the_other_patches_as_they_are(tmp_path: Path, series: Series) -> None:
    folder = tmp_path / "r"
    make_series(folder, COMMITS[:2])
    add_commit(folder, Commit("Another end", {"vllm/another.py": "x = 1\n"}))
    exported = export_repository(folder)
    assert exported.patches[:2] == series.patches[:2]
    assert exported.patches[2].name == "0003-another-end.patch"


_edits = st.lists(
    st.tuples(
        st.sampled_from(["vllm/envs.py", "vllm/sequence.py", "vllm/new_module.py"]),
        st.lists(st.sampled_from(["x = 1", "", "--- a", "# é", "@@ -1 +1 @@", "\tx"]), max_size=5),
    ),
    min_size=1,
    max_size=4,
)


@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(edits=_edits)
def test_any_texts_survive(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, list[str]]]
) -> None:
    folder = tmp_path_factory.mktemp("any")
    build_repository(folder / "r", PRISTINE, empty_series())
    for number, (path, lines) in enumerate(edits):
        text = "\n".join([f"# change {number}", *lines]) + os.linesep
        add_commit(folder / "r", Commit(f"Change {number}", {path: text}))
    series = export_repository(folder / "r")
    assert len(series.patches) == len(edits)
    build_repository(folder / "again", PRISTINE, series)
    assert export_repository(folder / "again") == series
    pristine = {path: PRISTINE.get(path) for path in series.paths}
    after = patched_contents(pristine, series)
    assert apply_patches(series.patches, after, reverse=True) == pristine
