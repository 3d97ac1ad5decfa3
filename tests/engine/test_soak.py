"""The short form of `./justw soak`: every request ends one way, and nothing is held at the end."""

from __future__ import annotations

import pytest
from rich.console import Console

from soak.__main__ import soak

pytestmark = pytest.mark.engine


def test_a_short_soak() -> None:
    report = soak(minutes=0.5, clients=10, seed=7, notes=Console(stderr=True))
    assert report["wrong"] == []
    ends = ("committed", "failed", "aborted", "refused")
    assert sum(report[outcome] for outcome in ends) == report["sent"] > 20
    assert not any(report["left"].values())
