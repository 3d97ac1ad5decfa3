"""What of a checkout may be exported: a HEAD that is all of the series, on its branch."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stagetap.errors import Refused, StageTapError
from stagetap.patchstack.gitrun import GitError, git
from stagetap.patchstack.series import Series
from stagetap.patchstack.workshop import export_repository
from unit.patchstack.synthetic import Commit, add_commit, make_series


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout of three commits, and a side branch that contradicts the last of them."""
    folder = tmp_path_factory.mktemp("made") / "r"
    make_series(folder)
    git("switch", "--quiet", "-c", "side", "HEAD~", cwd=folder)
    edit = {"vllm/config/model.py": ("hook = 1\n", "hook = 9\n")}
    add_commit(folder, Commit("Aside", edit))
    git("switch", "--quiet", "series", cwd=folder)
    return folder


@pytest.fixture
def folder(tmp_path: Path, made: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "r"))


def _stops(folder: Path, *arguments: str) -> None:
    with contextlib.suppress(GitError):
        git(*arguments, cwd=folder)


def _rebase(folder: Path) -> None:
    editor = "sequence.editor=sed -i '2s/pick/edit/'"
    _stops(folder, "-c", editor, "rebase", "--interactive", "pristine")


def _am(folder: Path) -> None:
    mail = git("format-patch", "--stdout", "-1", "side", cwd=folder)
    with contextlib.suppress(GitError):
        git("am", "--quiet", cwd=folder, stdin=mail)


def _picked(folder: Path) -> None:
    """A pick of two, its first conflict committed with `git commit`: HEAD and files look clean."""
    _stops(folder, "cherry-pick", "side", "side~")
    git("checkout", "--ours", ".", cwd=folder)
    git("add", "--all", cwd=folder)
    git("commit", "--quiet", "--allow-empty", "-m", "Picked", cwd=folder)


def _bisect(folder: Path) -> None:
    git("bisect", "start", "series", "pristine", cwd=folder)


UNDER_WAY: dict[str, Callable[[Path], None]] = {
    "rebase: end it with `git rebase --continue`": _rebase,
    "rebase: end it with": lambda folder: _stops(folder, "rebase", "--apply", "side"),
    "cherry-pick: end it with `git cherry-pick --continue`": _picked,
    "cherry-pick: end it": lambda folder: _stops(folder, "cherry-pick", "side"),
    "am: end it with `git am --continue` or `git am --abort`": _am,
    "merge: end it with `git merge --continue`": lambda folder: _stops(folder, "merge", "side"),
    "revert: end it with `git revert --continue`": lambda folder: _stops(
        folder, "revert", "--no-commit", "HEAD"
    ),
    "bisect: end it with `git bisect reset`": _bisect,
}


@pytest.mark.parametrize("said", UNDER_WAY)
def test_what_git_has_not_finished_is_not_exported(folder: Path, said: str) -> None:
    UNDER_WAY[said](folder)
    with pytest.raises(Refused) as refused:
        export_repository(folder)
    assert f"in the middle of a git {said}" in str(refused.value)


@pytest.mark.parametrize(
    ("commands", "said"),
    [
        (["switch -q --detach HEAD~2"], r"detached HEAD.*branch series: `git switch series`"),
        (["switch -q side"], "on the branch side"),
        (["reset -q --hard pristine"], "no commit above its tag pristine"),
        (["tag -f pristine HEAD~"], "`vLLM 0.32.0 as released` below HEAD"),
        (["tag -d pristine"], "pristine"),
        (["checkout -q --orphan other", "commit -q -m x", "branch -M series"], "below HEAD"),
        (["merge -q -s ours -m Merge side"], "has merges"),
        (["config stagetap.vllmVersion ../../evil"], r"'\.\./\.\./evil' is no version"),
        (["config stagetap.vllmVersion 0.33.0"], "`vLLM 0.33.0 as released`"),
        (["config --unset stagetap.vllmVersion"], "no stagetap.vllmVersion; make one with"),
    ],
)
def test_a_head_that_is_not_the_series_is_not_exported(
    folder: Path, commands: list[str], said: str
) -> None:
    for command in commands:
        git(*command.split(), cwd=folder)
    with pytest.raises(StageTapError, match=said):
        export_repository(folder)


def test_patches_are_dropped_on_the_branch_of_the_series(folder: Path, series: Series) -> None:
    git("reset", "--quiet", "--hard", "HEAD~", cwd=folder)
    assert export_repository(folder).patches == series.patches[:2]


def test_uncommitted_work_is_not_lost(folder: Path) -> None:
    git("config", "status.showUntrackedFiles", "no", cwd=folder)
    (folder / "vllm/new.py").write_text("not committed\n")
    with pytest.raises(Refused, match="not committed"):
        export_repository(folder)


def test_what_is_no_checkout_is_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("", "none", "file"):
        with pytest.raises(Refused, match=r"is no checkout of a series.*patch checkout FOLDER"):
            export_repository(tmp_path / name)
    with pytest.raises(GitError, match="none is no folder"):
        git("status", cwd=tmp_path / "none")


@pytest.mark.parametrize(
    ("path", "message", "said"),
    [
        (None, "Nothing", r"\(Nothing\) changes no file; drop it"),
        ("vllm/a b.py", "Space", r"can name 'vllm/a b\.py'"),
        ('vllm/a"b.py', "Quote", "can name 'vllm/a\"b"),
        ("vllm/a.py", "Rule\n\nabove\n---\nbelow", "holds the line '---'"),
        ("vllm/a.py", "Diff\n\ndiff --git a/vllm/x.py b/vllm/x.py", "line 'diff --git a/vllm/x.py"),
        ("vllm/a.py", f"Mail\n\nFrom {'0' * 40} Mon Sep 17 00:00:00 2001", "the line 'From 0000"),
        ("vllm/a.py", "...", r"no file name can be made"),
    ],
)
def test_a_commit_that_can_be_no_patch_is_named(
    folder: Path, path: str | None, message: str, said: str
) -> None:
    if path is not None:
        (folder / path).write_text("x = 1\n")
    git("add", "--all", cwd=folder)
    git("commit", "--quiet", "--allow-empty", "-m", message, cwd=folder)
    with pytest.raises(StageTapError, match=said):
        export_repository(folder)
