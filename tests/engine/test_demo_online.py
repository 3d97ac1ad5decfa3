"""The demonstration of the online path: an engine, a store and a consumer, each on its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.harness import clean_environment
from mooncake_here import require_mooncake

pytestmark = [pytest.mark.engine, pytest.mark.mooncake, pytest.mark.full]


def test_demo_online() -> None:
    require_mooncake()
    done = subprocess.run(
        [sys.executable, "-m", "stagetap", "demo-online"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for line in ("keys left: 0", "bitwise: yes"):
        assert line in done.stdout.splitlines()
    for what in ("produced", "consumed", "deleted"):
        assert any(what in line and " 8" in line for line in done.stdout.splitlines())
