"""The tests that go upstream with the patches pass on the patched vLLM, in folders of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stagetap.engine.environment import engine_environment
from stagetap.patchstack.locate import patches_root
from stagetap.patchstack.upstream import FOLDER

pytestmark = pytest.mark.slow


def test_upstream_tests_pass(tmp_path: Path) -> None:
    for folder in sorted((patches_root() / FOLDER).iterdir()):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    # The upstream tests name models that are nowhere; offline, vLLM would look for their files.
    environment = {**os.environ, **engine_environment(1, 1)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs",
         "--import-mode=importlib", "--rootdir", str(tmp_path), "tests"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "30 passed" in done.stdout, done.stdout
