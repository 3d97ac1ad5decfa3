"""One git-format-patch of the series, read as text. Pure."""

from __future__ import annotations

import email
import email.policy
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from stagetap.errors import StageTapError

ChangeKind = Literal["modify", "create", "other"]

_DIFF = re.compile(r"^diff --git a/(\S+) b/(\S+)$", re.MULTILINE)
_HUNK = re.compile(r"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_TAG = re.compile(r"^([A-Z][A-Za-z]*(?:-[A-Z][A-Za-z]*)*): *(.*)$")
_FILE_NAME = re.compile(r"^(\d{4})-([a-z0-9]+(?:-[a-z0-9]+)*)\.patch$")
_CONFLICT = re.compile(rb"^\+(?:<<<<<<< |>>>>>>> )", re.MULTILINE)
# Anything but a change or a new file: a hook never needs to delete, rename or carry binaries.
_OTHER_KINDS = ("deleted file", "rename ", "copy ", "old mode", "GIT binary patch", "Binary files")
# 120000 is a symbolic link, 160000 a repository.
_OTHER_MODE = re.compile(r"^(?:new file mode|index \S+) (?!100644$|100755$)")


class PatchFormatError(StageTapError, ValueError):
    """A patch file that is not what ``stagetap patch export`` writes."""


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file; ``path`` is relative to the folder that holds ``vllm/``."""

    path: str
    kind: ChangeKind
    added: int
    removed: int


@dataclass(frozen=True)
class Patch:
    """A patch and its file name; everything else is derived from the bytes.

    The properties raise PatchFormatError when the bytes are no patch in git's mail format.
    """

    name: str
    data: bytes

    @cached_property
    def _text(self) -> str:
        try:
            return self.data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PatchFormatError(f"{self.name} is not UTF-8: {error}") from error

    @cached_property
    def _head_and_diff(self) -> tuple[str, str]:
        first = _DIFF.search(self._text)
        if first is None:
            raise PatchFormatError(f"{self.name} holds no `diff --git` line")
        return self._text[: first.start()], self._text[first.start() :]

    @cached_property
    def subject(self) -> str:
        """The commit's subject, without ``[PATCH]``."""
        message = email.message_from_string(self._head_and_diff[0], policy=email.policy.default)
        subject = str(message.get("Subject", ""))
        if not subject.startswith("[PATCH] "):
            raise PatchFormatError(f"{self.name} has no `Subject: [PATCH] ...` line")
        return subject.removeprefix("[PATCH] ")

    @cached_property
    def body(self) -> str:
        """The commit's message below the subject: the reason, then the DEP-3 tags."""
        _, _, body = self._head_and_diff[0].partition("\n\n")
        return re.sub(r"\n---\n\s*$", "\n", body)

    @cached_property
    def tags(self) -> dict[str, str]:
        """The DEP-3 tags of the body's last paragraph, continuation lines joined."""
        tags: dict[str, str] = {}
        current = ""
        for line in self.body.rstrip().rpartition("\n\n")[2].splitlines():
            if found := _TAG.match(line):
                current = found[1]
                tags[current] = found[2]
            elif current and line.startswith((" ", "\t")):
                tags[current] = f"{tags[current]} {line.strip()}".strip()
        return tags

    @cached_property
    def changes(self) -> tuple[FileChange, ...]:
        """One entry for each file of the patch, in the patch's order."""
        diff = self._head_and_diff[1]
        starts = [found.start() for found in _DIFF.finditer(diff)]
        return tuple(
            _file_change(diff[start:end])
            for start, end in zip(starts, [*starts[1:], len(diff)], strict=True)
        )

    @property
    def conflicted(self) -> bool:
        """Whether it brings conflict markers along: carried over, and not resolved yet."""
        return _CONFLICT.search(self.data) is not None

    @property
    def added(self) -> int:
        """Lines this patch adds, over all its files."""
        return sum(change.added for change in self.changes)

    @property
    def removed(self) -> int:
        """Lines this patch removes, over all its files."""
        return sum(change.removed for change in self.changes)


def file_name(number: int, subject: str) -> str:
    """The name of the ``number``-th patch (from 1): ``0001-kebab-subject.patch``.

    Raises PatchFormatError when the subject holds no letter or digit.
    """
    kebab = re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")
    name = f"{number:04d}-{kebab}.patch"
    if _FILE_NAME.match(name) is None:
        raise PatchFormatError(f"no file name can be made from the subject {subject!r}")
    return name


def _file_change(section: str) -> FileChange:
    lines = section.splitlines()
    found = _DIFF.match(lines[0])
    assert found is not None, "sections are cut at these lines"
    hunks_at = next((i for i, line in enumerate(lines) if line.startswith("@@ ")), len(lines))
    header = lines[:hunks_at]
    kind: ChangeKind = "modify"
    if found[1] != found[2] or any(
        line.startswith(_OTHER_KINDS) or _OTHER_MODE.match(line) for line in header
    ):
        kind = "other"
    elif any(line.startswith("new file mode") for line in header):
        kind = "create"
    added, removed = _count(lines[hunks_at:])
    return FileChange(path=found[2], kind=kind, added=added, removed=removed)


def _count(lines: list[str]) -> tuple[int, int]:
    """Added and removed lines; follows the hunk headers, so that text is never read as a header."""
    added = removed = old_left = new_left = 0
    for line in lines:
        if old_left <= 0 and new_left <= 0:
            if hunk := _HUNK.match(line):
                old_left, new_left = int(hunk[1] or 1), int(hunk[2] or 1)
            continue
        if line.startswith("+"):
            added, new_left = added + 1, new_left - 1
        elif line.startswith("-"):
            removed, old_left = removed + 1, old_left - 1
        elif not line.startswith("\\"):
            old_left, new_left = old_left - 1, new_left - 1
    return added, removed
