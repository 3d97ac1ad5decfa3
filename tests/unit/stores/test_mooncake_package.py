"""A Mooncake package that is missing, too old, or does not load: one line with the cure."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from stagetap.errors import Refused
from stagetap.stores import mooncake_package
from stagetap.stores.mooncake_package import check_version, load_mooncake

NAME = "mooncake-transfer-engine-non-cuda"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose distributions come before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def install(folder: Path, version: str, name: str = NAME) -> None:
    """A distribution that consists of its metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").touch()


@pytest.mark.parametrize("version", ["0.3.12.post1", "0.3.12.post2", "0.3.13", "0.10.0", "1.0.0"])
def test_new_enough(installed: Path, version: str) -> None:
    install(installed, version)
    assert check_version() == version


@pytest.mark.parametrize("version", ["0.3.12", "0.3.11.post9", "0.2.99", "0.0.1", "unknown"])
def test_too_old(installed: Path, version: str) -> None:
    install(installed, version)
    with pytest.raises(Refused) as refused:
        check_version()
    assert f"{NAME} {version} is too old" in str(refused.value)
    assert f'pip install -U "{NAME}>=0.3.12.post1"' in str(refused.value)


def test_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(mooncake_package, "version", version)
    with pytest.raises(Refused, match=r"not installed: pip install \"stagetap\[mooncake-cpu\]\""):
        load_mooncake()


@pytest.mark.parametrize(
    ("message", "cure"),
    [
        (
            "libibverbs.so.1: cannot open shared object file: No such file or directory",
            "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2",
        ),
        (
            "liburing.so.2: cannot open shared object file: No such file or directory",
            "liburing is missing",
        ),
        (
            "libmlx5.so.1: cannot open shared object file: No such file or directory",
            "apt-get install ibverbs-providers libcurl4",
        ),
        (
            "libcudart.so.12: cannot open shared object file: No such file or directory",
            "this build is for another CUDA",
        ),
        ("libfoo.so.3: cannot open shared object file: No such file", "holds libfoo.so"),
        ("undefined symbol:\n _Z3foov", "Mooncake does not load: undefined symbol: _Z3foov"),
    ],
)
def test_does_not_load(
    installed: Path, monkeypatch: pytest.MonkeyPatch, message: str, cure: str
) -> None:
    def import_module(name: str) -> None:
        raise ImportError(message)

    install(installed, "0.3.13")
    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(Refused) as refused:
        load_mooncake()
    assert cure in str(refused.value)
    assert "\n" not in str(refused.value)
