"""Folders of a command: removed at its end, and after it was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagetap.engine.scratch import PREFIX, scratch_folder

HOLD = """
from stagetap.engine.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def test_it_is_gone_at_the_end(temporary: Path) -> None:
    with scratch_folder() as folder:
        (folder / "file").touch()
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next(temporary: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    theirs = Path(child.stdout.readline().strip())
    (theirs / "file").touch()
    other = temporary / "another"
    other.mkdir()
    file = temporary / f"{PREFIX}file"
    file.touch()
    with scratch_folder() as ours:
        assert theirs.is_dir()  # its process lives
        child.kill()
        child.communicate()
        with scratch_folder():
            assert not theirs.exists()
            assert ours.is_dir()
    assert set(temporary.iterdir()) == {other, file}
