"""One synthetic package a test; the series are made once, since each costs some git calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stagetap.patchstack.series import Series
from unit.patchstack import synthetic


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests kill processes, not the machine: waiting for a busy disk would prove nothing."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(scope="session")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return synthetic.make_series(tmp_path_factory.mktemp("series") / "repository")


@pytest.fixture(scope="session")
def older_series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    folder = tmp_path_factory.mktemp("older") / "repository"
    return synthetic.make_series(folder, synthetic.OLDER_COMMITS)


@pytest.fixture
def patches(tmp_path: Path, series: Series) -> Path:
    return synthetic.make_patches(tmp_path / "patches", series)


@pytest.fixture
def older_patches(tmp_path: Path, older_series: Series) -> Path:
    return synthetic.make_patches(tmp_path / "older-patches", older_series)


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    return synthetic.make_package(tmp_path / "site-packages")
