"""Fail, or die, at the n-th access to a folder: audit events see them all, ours to come too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# os.replace is os.rename here, unlink is os.remove.
_CHANGES = frozenset(
    f"os.{call}" for call in ("rename", "remove", "mkdir", "rmdir", "chmod", "chown", "utime")
)
_WRITING = os.O_WRONLY | os.O_RDWR


class _Fuse:
    """Counts accesses below ``folder`` and acts on the one that brings ``left`` to zero."""

    folder: str | None = None
    left = 0
    reads_count = True

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.folder is None or not str(arguments[0]).startswith(self.folder):
            return
        if event in _CHANGES or (event == "open" and self._counts(arguments[2])):
            self.left -= 1
            if self.left == 0:
                self.act()

    def _counts(self, flags: object) -> bool:
        return self.reads_count or (isinstance(flags, int) and bool(flags & _WRITING))

    def act(self) -> None:
        raise OSError(28, "injected: no space left on device")


_FUSE = _Fuse()
sys.addaudithook(lambda event, arguments: _FUSE(event, arguments or ("",)))


@dataclass(frozen=True)
class Outcome:
    """``fired`` is False when the action made fewer accesses than asked for."""

    fired: bool
    error: BaseException | None


def fail_at(access: int, folder: Path, action: Callable[[], object]) -> Outcome:
    """Run ``action`` with an OSError at its ``access``-th access (from 1) to ``folder``."""
    _FUSE.folder, _FUSE.left = str(folder), access
    try:
        action()
        return Outcome(_FUSE.left <= 0, None)
    except Exception as error:  # noqa: BLE001 - handed to the test
        return Outcome(_FUSE.left <= 0, error)
    finally:
        _FUSE.folder = None


def killed_at(change: int, folder: Path, action: Callable[[], object]) -> bool:
    """Let a child die before the ``change``-th change of ``action``; False if it came through."""
    child = os.fork()
    if child == 0:
        _FUSE.act = lambda: os._exit(137)  # type: ignore[method-assign]
        _FUSE.reads_count = False
        outcome = fail_at(change, folder, action)
        os._exit(0 if outcome.error is None else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 137), f"the child failed with {code}"
    return code == 137
