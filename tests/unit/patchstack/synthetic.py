"""A small package that looks like vLLM, and patch series for it made of real commits."""

from __future__ import annotations

import base64
import hashlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stagetap.patchstack.gitrun import git, write_files
from stagetap.patchstack.series import Lock, Series, series_digest, write_series
from stagetap.patchstack.workshop import build_repository, export_repository

# Mode and bytes of every file and folder by relative path; a folder's bytes are None.
Snapshot = dict[str, tuple[int, bytes | None]]

VERSION = "0.32.0"
TAGS = """Description: hands over to the plugin
Origin: vendor
Forwarded: no
Applied-Upstream: no
Last-Update: 2026-01-31"""

_LINES = "".join(f"line_{number} = {number}\n" for number in range(30))
PRISTINE: dict[str, bytes] = {
    "vllm/__init__.py": b"",
    "vllm/_version.py": b"__version__ = version = '0.32.0'\n",
    "vllm/config/__init__.py": b"",
    "vllm/config/model.py": ("# model\n" + _LINES).encode(),
    "vllm/envs.py": ("# envs\n" + _LINES).encode(),
    "vllm/sequence.py": ("# séquence\n" + _LINES).encode(),
}


@dataclass(frozen=True)
class Commit:
    """A patch to be: its subject, and lines to replace in files (a new file: its whole text)."""

    subject: str
    edits: Mapping[str, tuple[str, str] | str]
    tags: str = TAGS


COMMITS = (
    Commit(
        "Hook the model config",
        {
            "vllm/config/model.py": ("line_3 = 3\n", "line_3 = 3\nhook = 1\n"),
            "vllm/envs.py": ("line_20 = 20\n", "line_20 = 21\n"),
        },
    ),
    Commit("Add a module of hooks", {"vllm/stagetap_hooks.py": "HOOKS = []\n"}),
    Commit(
        "Hook the config again",
        {"vllm/config/model.py": ("hook = 1\n", "hook = 2\n# and once more\n")},
    ),
)
# What an older release might have carried: another file, and other contents of a common one.
OLDER_COMMITS = (
    Commit(
        "Hook the sequence",
        {
            "vllm/sequence.py": ("line_9 = 9\n", "line_9 = 10\n"),
            "vllm/envs.py": ("line_20 = 20\n", "line_20 = 22\n"),
        },
    ),
    Commit("Add an older module", {"vllm/older_hooks.py": "OLD = []\n"}),
)


def record_of(files: Mapping[str, bytes]) -> bytes:
    """The RECORD of a wheel with these files."""
    lines = []
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
        lines.append(f"{path},sha256={digest},{len(data)}\n")
    return "".join(lines).encode()


def make_package(parent: Path, files: Mapping[str, bytes] = PRISTINE) -> Path:
    """Install the package below ``parent``, with modes that a careless copy would lose."""
    write_files(parent, files)
    write_files(parent, {f"vllm-{VERSION}.dist-info/RECORD": record_of(files)})
    (parent / "vllm/envs.py").chmod(0o600)
    (parent / "vllm/config/model.py").chmod(0o755)
    return parent / "vllm"


def make_series(repository: Path, commits: Sequence[Commit] = COMMITS) -> Series:
    """Commit the edits in a new repository and export them."""
    build_repository(repository, PRISTINE, empty_series())
    for commit in commits:
        add_commit(repository, commit)
    return export_repository(repository)


def add_commit(repository: Path, commit: Commit) -> None:
    """One more patch."""
    for path, edit in commit.edits.items():
        target = repository / path
        if isinstance(edit, str):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(edit, "utf-8")
        else:
            text = target.read_text("utf-8")
            assert edit[0] in text
            target.write_text(text.replace(*edit, 1), "utf-8")
    git("add", "--all", cwd=repository)
    message = f"{commit.subject}\n\nThe reason.\n\n{commit.tags}\n"
    git("commit", "--quiet", "-m", message, cwd=repository, date="2026-01-31T12:00:00+0000")


def empty_series(version: str = VERSION) -> Series:
    """A series without patches."""
    return Series((), Lock(version, series_digest(()), {}))


def make_patches(root: Path, series: Series) -> Path:
    """A ``patches`` folder with this one series."""
    write_series(series, root / "vllm" / series.version)
    return root


def snapshot(folder: Path) -> Snapshot:
    """What a revert must give back."""
    return {
        path.relative_to(folder).as_posix(): (
            stat.S_IMODE(path.lstat().st_mode),
            None if path.is_dir() else path.read_bytes(),
        )
        for path in sorted(folder.rglob("*"))
    }
