"""Whether a checkout may be exported: its HEAD is all of the series, and nothing is under way.

A HEAD that is elsewhere has fewer commits above the release than the series: exported, it would
drop patches without a word.
"""

from __future__ import annotations

from pathlib import Path

from stagetap.errors import Refused
from stagetap.patchstack.gitrun import GitError, git
from stagetap.patchstack.locate import check_version

BRANCH = "series"
PRISTINE_TAG = "pristine"
VERSION_KEY = "stagetap.vllmVersion"

# By what git leaves in its folder meanwhile, the telling names first: the command, and how it ends.
_UNDER_WAY = {
    "rebase-merge": ("rebase", "--continue", "--abort"),
    "rebase-apply/applying": ("am", "--continue", "--abort"),
    "rebase-apply": ("rebase", "--continue", "--abort"),
    "MERGE_HEAD": ("merge", "--continue", "--abort"),
    "REVERT_HEAD": ("revert", "--continue", "--abort"),
    "CHERRY_PICK_HEAD": ("cherry-pick", "--continue", "--abort"),
    "sequencer": ("cherry-pick", "--continue", "--abort"),
    "BISECT_LOG": ("bisect", "reset", "reset"),
}


def release_subject(version: str) -> str:
    """The subject of the commit that ``PRISTINE_TAG`` names."""
    return f"vLLM {version} as released"


def exportable_version(folder: Path) -> str:
    """The release of the checkout ``folder``, whose commits up to HEAD are its series.

    Raises Refused, with the cure, for a folder that is no checkout, a git command that is not
    finished, a HEAD that is not the branch of the series or has no patch, and uncommitted work.
    """
    version = _version(folder)
    _check_finished(folder)
    _check_branch(folder)
    if git("status", "--porcelain", "--untracked-files=normal", cwd=folder).strip():
        raise Refused(f"{folder} has changes that are not committed; commit or discard them")
    subject = git("log", "-1", "--format=%s", PRISTINE_TAG, cwd=folder).decode().strip()
    if subject != release_subject(version) or _count(folder, f"HEAD..{PRISTINE_TAG}"):
        raise Refused(
            f"{folder}: its tag {PRISTINE_TAG} is not the commit `{release_subject(version)}` "
            "below HEAD; make another checkout and put the commits onto it"
        )
    if not _count(folder, f"{PRISTINE_TAG}..HEAD"):
        raise Refused(
            f"{folder} has no commit above its tag {PRISTINE_TAG}, and a series without a patch is "
            "none; find the commits with `git reflog`, or make another checkout"
        )
    if _count(folder, "--merges", f"{PRISTINE_TAG}..HEAD"):
        raise Refused(
            f"{folder} has merges above its tag {PRISTINE_TAG}; rebase them into one line"
        )
    return version


def _version(folder: Path) -> str:
    try:
        if (folder / ".git").exists():
            return check_version(git("config", VERSION_KEY, cwd=folder).decode().strip())
        reason = "it holds no .git"
    except Refused as error:
        reason = f"{VERSION_KEY}: {error}"
    except GitError:
        reason = f"its git has no {VERSION_KEY}"
    raise Refused(
        f"{folder} is no checkout of a series: {reason}; make one with "
        "`stagetap patch checkout FOLDER`"
    )


def _check_finished(folder: Path) -> None:
    git_folder = folder / git("rev-parse", "--git-dir", cwd=folder).decode().strip()
    for name, (command, finish, abandon) in _UNDER_WAY.items():
        if (git_folder / name).exists():
            ways = dict.fromkeys(f"`git {command} {how}`" for how in (finish, abandon))
            raise Refused(
                f"{folder} is in the middle of a git {command}: end it with {' or '.join(ways)}"
            )


def _check_branch(folder: Path) -> None:
    try:
        head = git("symbolic-ref", "--quiet", "--short", "HEAD", cwd=folder).decode().strip()
    except GitError:
        head = ""
    if head != BRANCH:
        raise Refused(
            f"{folder} is {f'on the branch {head}' if head else 'at a detached HEAD'}, and the "
            f"series is its branch {BRANCH}: `git switch {BRANCH}`, or, if the series is to be "
            f"what is here, `git switch -C {BRANCH}`"
        )


def _count(folder: Path, *commits: str) -> int:
    return int(git("rev-list", "--count", *commits, cwd=folder))
