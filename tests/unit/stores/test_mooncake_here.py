"""Tests that need Mooncake: skipped with the cure, but in CI that could have installed it."""

from __future__ import annotations

import pytest

import mooncake_here

CURE = "Mooncake does not load, libnuma is missing: apt-get install libnuma1"


@pytest.mark.parametrize(
    ("ci", "uid", "no_cure", "outcome"),
    [
        ("", 0, None, pytest.skip.Exception),
        ("true", 1000, None, pytest.skip.Exception),
        ("true", 0, None, pytest.fail.Exception),
        ("true", 0, "and apt-get update reaches no network from here", pytest.skip.Exception),
    ],
)
def test_ci_as_root_fails_unless_nothing_can_be_installed(
    monkeypatch: pytest.MonkeyPatch,
    ci: str,
    uid: int,
    no_cure: str | None,
    outcome: type[BaseException],
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(mooncake_here.os, "geteuid", lambda: uid)
    monkeypatch.setattr(mooncake_here, "tell_library", lambda seconds, host: None)
    monkeypatch.setattr(mooncake_here, "_why_not", lambda: CURE)
    monkeypatch.setattr(mooncake_here, "_why_nothing_can_be_installed", lambda: no_cure)
    with pytest.raises(outcome, match="libnuma1") as ended:
        mooncake_here.require_mooncake()
    assert (no_cure or "") in str(ended.value)
