"""git, shielded from the user's and the machine's settings, and the one tool that applies.

``git apply`` takes no fuzz: every context line must match, as with ``patch --fuzz=0``. It runs in
a temporary folder that holds only the touched files, outside of any repository, because inside
one it would silently skip files.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from stagetap.errors import StageTapError
from stagetap.patchstack.patchfile import Patch

# Bytes of files by patch path; None is a file that does not exist.
Contents = Mapping[str, bytes | None]


class GitError(StageTapError):
    """git is missing, or refused; the message is git's own."""


class PatchDoesNotApply(StageTapError):
    """A patch does not fit the files it was given; names the patch and says what git said."""


def git(
    *arguments: str,
    cwd: Path,
    stdin: bytes | None = None,
    date: str | None = None,
    with_stderr: bool = False,
) -> bytes:
    """Run git in ``cwd`` and return its stdout, with its stderr behind when ``with_stderr``.

    Raises GitError with git's message.
    """
    settings = ("core.autocrlf=false", "core.quotePath=false", "commit.gpgSign=false")
    command = ["git", *(part for s in settings for part in ("-c", s)), *arguments]
    try:
        done = subprocess.run(
            command, cwd=cwd, env=_environment(cwd, date), input=stdin or b"", capture_output=True
        )
    except FileNotFoundError as error:
        if not cwd.is_dir():
            raise GitError(f"{cwd} is no folder; name one that is there") from error
        raise GitError("git is needed to work with patches; install it") from error
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip()).decode(errors="replace")
        raise GitError(said or f"git {arguments[0]} failed")
    return done.stdout + done.stderr if with_stderr else done.stdout


def apply_patches(patches: Iterable[Patch], files: Contents, *, reverse: bool = False) -> Contents:
    """``files`` after the patches, or before them when ``reverse``; a pure function but for git.

    Patches act on the given files only, so a single file can be taken through a whole series.
    Raises PatchDoesNotApply on the first patch whose context is not found.
    """
    only = [f"--include={path}" for path in files]
    direction = ["--reverse"] if reverse else []
    with tempfile.TemporaryDirectory(prefix="stagetap-patch-") as folder:
        root = Path(folder).resolve()
        write_files(root, files)
        for patch in reversed(list(patches)) if reverse else patches:
            if not files.keys() & {change.path for change in patch.changes}:
                continue
            try:
                git("apply", "--whitespace=nowarn", *direction, *only, cwd=root, stdin=patch.data)
            except GitError as error:
                raise PatchDoesNotApply(f"{patch.name} does not apply: {error}") from error
        return {path: read_file(root / path) for path in files}


def write_files(root: Path, files: Contents) -> None:
    """Write ``files`` below ``root``."""
    for path, data in files.items():
        if data is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)


def read_file(path: Path) -> bytes | None:
    """A file's bytes, or None when it does not exist."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _environment(cwd: Path, date: str | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    environment |= {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CEILING_DIRECTORIES": str(cwd.parent),
        "LC_ALL": "C",
    }
    if date is not None:
        environment |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    return environment
