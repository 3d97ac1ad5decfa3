"""One synthetic package a test; the series are made once, since each costs some git calls."""

from __future__ import annotations

from pathlib import Path

import pytest
from unit.patchstack import synthetic

from stagetap.patchstack.series import Series


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
