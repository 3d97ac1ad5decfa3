"""A machine on which no Docker daemon can be had: the tests of the image say why."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from image import daemon
from image.daemon import NeedsRoot, NoDaemon, install, running_daemon


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An executable path with a dockerd that ends at once, and no apt-get."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("dockerd", "debootstrap"):
        program = folder / name
        program.write_text("#!/bin/sh\necho 'failed to start daemon: no overlay' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return folder


def test_a_daemon_that_ends_leaves_its_last_words(programs: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(NoDaemon, match="does not come up: failed to start daemon: no overlay"),
        running_daemon(tmp_path / "cache"),
    ):
        pass


def test_a_user_who_is_not_root_is_told(
    programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NeedsRoot, match="need root"), running_daemon(tmp_path / "cache"):
        pass


def test_a_missing_program_is_named_by_its_package(programs: Path) -> None:
    (programs / "dockerd").unlink()
    with pytest.raises(NoDaemon, match=r"apt-get install docker\.io is needed"):
        install(daemon.PROGRAMS)
