"""Work on the series as commits: series -> git repository -> series, without losing a byte.

The repository holds the pristine files in its first commit, tagged ``pristine``, and one commit
for each patch above it. Exports are deterministic: no commit ids, no versions, full blob ids.
"""

from __future__ import annotations

import re
from pathlib import Path

from stagetap.errors import Refused
from stagetap.patchstack.checkout import (
    BRANCH,
    PRISTINE_TAG,
    VERSION_KEY,
    exportable_version,
    release_subject,
)
from stagetap.patchstack.gitrun import Contents, GitError, git, write_files
from stagetap.patchstack.patchfile import Patch, file_name
from stagetap.patchstack.series import Lock, Pin, Series, series_digest, sha256
from stagetap.stores.file_io import naming

_AUTHOR = ("StageTap contributors", "contributors@stagetap.invalid")
EPOCH = "2000-01-01T00:00:00+0000"
FORMAT_PATCH = (
    "format-patch",
    "--stdout",
    "--zero-commit",
    "--full-index",
    "--no-stat",
    "--no-signature",
    "--no-numbered",
    "--no-renames",
    "--no-base",
    "--no-encode-email-headers",
    "--no-ext-diff",
    "--no-textconv",
    "--diff-algorithm=myers",
    "--unified=3",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--subject-prefix=PATCH",
)


# Any other path stands quoted in a patch, or ends too early there.
_UNQUOTED = re.compile(r'[^\s"\\\x00-\x1f\x7f]+')
_MESSAGE_END = re.compile(
    r"^(?:---(?:[ \t].*)?|diff -.*|Index: .*|From .*\d:\d\d:\d\d.*)$", re.MULTILINE
)


def build_repository(folder: Path, pristine: Contents, series: Series) -> None:
    """Make ``folder`` a repository of ``pristine`` with every patch as a commit.

    Raises Refused when the folder is in use, GitError naming the patch that does not apply,
    StoreError where nothing can be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} is not empty; name a new folder")
    with naming("make a repository in", str(folder)):
        folder.mkdir(parents=True, exist_ok=True)
        write_files(folder, pristine)
    git("init", "--quiet", f"--initial-branch={BRANCH}", "--template=", cwd=folder)
    settings = {"user.name": _AUTHOR[0], "user.email": _AUTHOR[1], VERSION_KEY: series.version}
    for key, value in {**settings, "core.autocrlf": "false"}.items():
        git("config", key, value, cwd=folder)
    (folder / ".git/info").mkdir(exist_ok=True)
    (folder / ".git/info/exclude").write_text("__pycache__/\n")
    git("add", "--all", "--force", cwd=folder)
    subject = release_subject(series.version)
    git("commit", "--quiet", "--allow-empty", "-m", subject, cwd=folder, date=EPOCH)
    git("tag", PRISTINE_TAG, cwd=folder)
    for patch in series.patches:
        try:
            git("am", "--quiet", "--keep-cr", "--whitespace=nowarn", cwd=folder, stdin=patch.data)
        except GitError as error:
            said = str(error).splitlines()[0]  # advice for a person follows
            raise GitError(f"{patch.name}: git am does not take it: {said}") from error


def export_repository(folder: Path) -> Series:
    """The series that the repository's commits above ``pristine`` make up.

    Raises Refused, with the cure, where HEAD is not all of the series (``exportable_version``),
    and for a commit that cannot be a patch of it.
    """
    version = exportable_version(folder)
    commits = git("rev-list", "--reverse", f"{PRISTINE_TAG}..HEAD", cwd=folder).decode().split()
    patches = tuple(_patch(folder, number, commit) for number, commit in enumerate(commits, 1))
    paths = sorted({change.path for patch in patches for change in patch.changes})
    pins = {path: _pin(folder, path) for path in paths}
    return Series(patches, Lock(version, series_digest(patches), pins))


def released_blobs(folder: Path, series: Series) -> Contents:
    """What each file of ``series`` is in the release that the repository is made of."""
    return {path: _blob(folder, PRISTINE_TAG, path) for path in series.paths}


def _patch(folder: Path, number: int, commit: str) -> Patch:
    called = git("log", "-1", "--format=commit %h (%s)", commit, cwd=folder).decode().strip()
    listed = git("diff-tree", "-r", "-z", "--no-commit-id", "--name-only", commit, cwd=folder)
    if not listed:
        raise Refused(f"{called} changes no file; drop it with `git rebase -i {PRISTINE_TAG}`")
    for path in listed.decode(errors="replace").rstrip("\0").split("\0"):
        if _UNQUOTED.fullmatch(path) is None:
            raise Refused(f"{called}: no patch of a series can name {path!r}; call it otherwise")
    message = git("log", "-1", "--format=%B", commit, cwd=folder).decode(errors="replace")
    if ending := _MESSAGE_END.search(message):
        raise Refused(
            f"{called}: its message holds the line {ending[0]!r}, where git takes a message to "
            f"end; indent it with `git rebase -i {PRISTINE_TAG}`"
        )
    patch = Patch(called, git(*FORMAT_PATCH, "-1", commit, cwd=folder))
    return Patch(file_name(number, patch.subject), patch.data)


def _pin(folder: Path, path: str) -> Pin:
    after = sha256(_blob(folder, "HEAD", path))
    if after is None:
        raise Refused(f"{path} is deleted by the series; a hook deletes nothing")
    return Pin(before=sha256(_blob(folder, PRISTINE_TAG, path)), after=after)


def _blob(folder: Path, commit: str, path: str) -> bytes | None:
    listed = git("ls-tree", commit, "--", path, cwd=folder)
    return git("cat-file", "blob", f"{commit}:{path}", cwd=folder) if listed.strip() else None
