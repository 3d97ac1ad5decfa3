"""What a loaded vLLM knows of the plugin, on a machine without the device it was built for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.harness import clean_environment

pytestmark = pytest.mark.engine

# A build of an image for GPUs has none: vLLM then knows of no platform.
WITHOUT_DEVICE = """
import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform

import stagetap.engine.registered as registered

vllm.platforms._current_platform = UnspecifiedPlatform()
registered.is_cpu_build = lambda: False
registered.main()
"""


def test_the_flags_are_found_without_a_device() -> None:
    child = subprocess.run(
        [sys.executable, "-c", WITHOUT_DEVICE],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    checks = {each["check"]: each for each in json.loads(child.stdout.splitlines()[-1])}
    assert all(each["cure"] is None for each in checks.values())
    assert "no device is here" in checks["flags"]["found"]
    assert checks["pipeline stages"]["found"].startswith("TapWorker")
