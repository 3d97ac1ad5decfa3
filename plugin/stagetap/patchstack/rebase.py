"""Carry a series over to another release: each patch is merged three-way with git.

Common ancestor of a merge is the old release with the patches before it, one side is the same with
the patch, the other the new release with what was carried over so far. What conflicts is committed
with git's conflict markers, so that later patches find their place, and listed; a series with
markers is never applied (``Patch.conflicted``). The result of an exact application is not trusted
where the merge gives another file: lines that occur twice could take a hook to the wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stagetap.patchstack.checkout import BRANCH, PRISTINE_TAG, VERSION_KEY, release_subject
from stagetap.patchstack.gitrun import Contents, GitError, git, write_files
from stagetap.patchstack.patchfile import Patch
from stagetap.patchstack.series import Series
from stagetap.patchstack.workshop import EPOCH, build_repository

Fate = Literal["applies", "offset", "merges", "conflicts", "absorbed"]
"""``merges``: git merges it cleanly, but the context changed and nothing else would place it."""

_OFFSET = re.compile(r"\(offset (-?\d+) lines?\)")
# git writes commit ids behind them, which differ from run to run.
_BEGIN = re.compile(rb"^<<<<<<< .*\n", re.MULTILINE)
_END = re.compile(rb"^>>>>>>> .*\n", re.MULTILINE)
_OLD_BASE = "stagetap-old-base"
_OLD_HEAD = "stagetap-old-head"


@dataclass(frozen=True)
class Carried:
    """What became of one patch in another release.

    Attributes:
        patch: its file name in the old series.
        offset: the farthest that a hunk has moved, in lines.
        conflicts: regions in conflict by file; 0 for a file that the release does not have.
        added: lines that are left of what it adds; of a patch with conflicts, all of them.
        removed: lines that are left of what it removes, likewise.
    """

    patch: str
    fate: Fate
    offset: int
    conflicts: Mapping[str, int]
    added: int
    removed: int

    def document(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "patch": self.patch,
            "fate": self.fate,
            "offset": self.offset,
            "conflicts": dict(self.conflicts),
            "added": self.added,
            "removed": self.removed,
        }


def start_rebase(folder: Path, pristine: Contents, series: Series) -> None:
    """Make ``folder`` a repository of the old release with its series, to carry over from.

    Raises Refused when the folder is in use, GitError when the series does not apply.
    """
    build_repository(folder, pristine, series)
    git("tag", _OLD_BASE, PRISTINE_TAG, cwd=folder)
    git("tag", _OLD_HEAD, cwd=folder)


def carry_over(folder: Path, series: Series, release: Contents, version: str) -> Iterator[Carried]:
    """Make the new release the repository's base and merge one patch for each step.

    Afterwards ``export_repository`` gives the new series. May be called again for another release.
    Raises GitError when git refuses something that is no conflict.
    """
    git("switch", "--quiet", "-C", BRANCH, _OLD_BASE, cwd=folder)
    for path in git("ls-files", "-z", cwd=folder).decode().split("\0"):
        if path and path not in release:
            (folder / path).unlink()
    write_files(folder, release)
    git("config", VERSION_KEY, version, cwd=folder)
    git("add", "--all", "--force", cwd=folder)
    subject = release_subject(version)
    git("commit", "--quiet", "--allow-empty", "-m", subject, cwd=folder, date=EPOCH)
    git("tag", "--force", PRISTINE_TAG, cwd=folder)
    commits = git("rev-list", "--reverse", f"{_OLD_BASE}..{_OLD_HEAD}", cwd=folder).decode()
    for patch, commit in zip(series.patches, commits.split(), strict=True):
        yield _carry(folder, patch, commit)


def finish_rebase(folder: Path) -> None:
    """Leave only the new release and its commits to be seen."""
    git("tag", "--delete", _OLD_BASE, _OLD_HEAD, cwd=folder)


def _carry(folder: Path, patch: Patch, commit: str) -> Carried:
    exact = _exact_application(folder, patch)
    conflicts = _merge(folder, patch, commit)
    tree = git("write-tree", cwd=folder)
    added, removed = (patch.added, patch.removed) if conflicts else _lines(folder)
    left = bool(git("diff", "--cached", "--name-only", "HEAD", cwd=folder).strip())
    if left:
        git("commit", "--quiet", "--reuse-message", commit, cwd=folder, date=EPOCH)
    fate: Fate = "merges"
    if conflicts:
        fate = "conflicts"
    elif not left:
        fate = "absorbed"
    elif exact is not None and exact[0] == tree:
        fate = "offset" if exact[1] else "applies"
    offset = exact[1] if exact is not None and fate == "offset" else 0
    return Carried(patch.name, fate, offset, conflicts, added, removed)


def _exact_application(folder: Path, patch: Patch) -> tuple[bytes, int] | None:
    """The tree that ``git apply`` gives, and the farthest offset; None when it refuses."""
    try:
        said = git(
            "apply", "--index", "--verbose", "--whitespace=nowarn",
            cwd=folder, stdin=patch.data, with_stderr=True,
        )  # fmt: skip
    except GitError:
        return None
    tree = git("write-tree", cwd=folder)
    git("reset", "--quiet", "--hard", cwd=folder)
    offsets = [abs(int(lines)) for lines in _OFFSET.findall(said.decode())]
    return tree, max(offsets, default=0)


def _merge(folder: Path, patch: Patch, commit: str) -> dict[str, int]:
    """Merge a commit into index and files; returns the conflicts, which are staged as they are."""
    try:
        git("cherry-pick", "--no-commit", "--allow-empty", commit, cwd=folder)
        return {}
    except GitError:
        unmerged = _unmerged(folder)
        if not unmerged:
            raise
    conflicts = {}
    for path, stages in unmerged.items():
        if "2" not in stages:  # gone from the release: there is nothing to put the hook into
            conflicts[path] = 0
            git("rm", "--quiet", "--force", "--", path, cwd=folder)
            continue
        marked = _BEGIN.sub(b"<<<<<<< the release\n", (folder / path).read_bytes())
        (folder / path).write_bytes(_END.sub(f">>>>>>> {patch.name}\n".encode(), marked))
        conflicts[path] = len(_BEGIN.findall(marked))
        git("add", "--force", "--", path, cwd=folder)
    return conflicts


def _unmerged(folder: Path) -> dict[str, set[str]]:
    """Paths in conflict with their stages: 1 ancestor, 2 the release, 3 the patch."""
    found: dict[str, set[str]] = {}
    for entry in git("ls-files", "--unmerged", "-z", cwd=folder).decode().split("\0"):
        if entry:
            facts, _, path = entry.partition("\t")
            found.setdefault(path, set()).add(facts.split()[2])
    return found


def _lines(folder: Path) -> tuple[int, int]:
    """Lines added and removed in the index."""
    added = removed = 0
    for line in git("diff", "--cached", "--numstat", "HEAD", cwd=folder).decode().splitlines():
        more, fewer, _path = line.split("\t")
        added, removed = added + int(more), removed + int(fewer)
    return added, removed
