"""Fail, or die, at the n-th access to a folder: audit events see them all, ours to come too."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_CHANGES = frozenset(
    "open os.rename os.remove os.mkdir os.rmdir os.chmod os.chown os.utime shutil.copyfile".split()
)


class _Fuse:
    """Counts accesses below ``folder`` and acts on the one that brings ``left`` to zero."""

    folder: str | None = None
    left = 0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.folder is None or event not in _CHANGES or not self._concerned(arguments):
            return
        self.left -= 1
        if self.left == 0:
            self.act()

    def _concerned(self, arguments: tuple[object, ...]) -> bool:
        return any(str(argument).startswith(self.folder or "") for argument in arguments)

    def act(self) -> None:
        raise OSError(28, "injected: no space left on device")


_FUSE = _Fuse()
sys.addaudithook(_FUSE)


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


def killed_at(access: int, folder: Path, action: Callable[[], object]) -> bool:
    """Run ``action`` in a child that dies at its ``access``-th access; False when it came through."""
    child = os.fork()
    if child == 0:
        _FUSE.act = lambda: os._exit(137)  # type: ignore[method-assign]
        outcome = fail_at(access, folder, action)
        os._exit(0 if outcome.error is None else 1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 137), f"the child failed with {code}"
    return code == 137
