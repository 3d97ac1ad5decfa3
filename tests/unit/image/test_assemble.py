"""The steps inside a base, on a package that stands for vLLM."""

from __future__ import annotations

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from stagetap import patchstack
from stagetap.patchstack.series import load_series
from stagetap_image import assemble
from stagetap_image.errors import BuildRefused
from unit.patchstack import synthetic


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A released package, and the series for it; every call of patchstack means these."""
    series = synthetic.make_series(tmp_path / "series")
    patches = synthetic.make_patches(tmp_path / "patches", series)
    package = synthetic.make_package(tmp_path / "site-packages")
    for name in ("status", "apply"):
        real = getattr(patchstack, name)
        monkeypatch.setattr(patchstack, name, lambda real=real: real(package, patches))
    return package


def digest_and_version() -> tuple[str, str]:
    series = patchstack.status().series
    return series.digest, series.version


def test_a_released_base_is_taken(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digest, version = digest_and_version()
    assemble.check_base(version, digest)
    assert "is as released" in capsys.readouterr().out


def test_other_bases_are_refused_by_name(base: Path) -> None:
    digest, version = digest_and_version()
    with pytest.raises(BuildRefused, match=r"bases\.lock says 1\.2\.3"):
        assemble.check_base("1.2.3", digest)
    with pytest.raises(BuildRefused, match="labelled with none"):
        assemble.check_base(version, "")
    patched = patchstack.apply()
    path = sorted(patched.series.paths)[0]
    with pytest.raises(BuildRefused, match=f"{path} is applied"):
        assemble.check_base(version, digest)
    file = patched.package.file(path)
    file.write_text(file.read_text() + "# mine\n")
    with pytest.raises(BuildRefused, match=f"{path} is unknown"):
        assemble.check_base(version, digest)


def test_a_file_that_no_patch_touches_must_be_that_of_its_wheel(base: Path) -> None:
    digest, version = digest_and_version()
    other = base / "config/__init__.py"
    other.write_text("x = 2\n")
    with pytest.raises(BuildRefused, match=r"vllm/config/__init__\.py is not what its wheel"):
        assemble.check_base(version, digest)
    other.unlink()
    with pytest.raises(BuildRefused, match=r"vllm/config/__init__\.py is missing"):
        assemble.check_base(version, digest)
    (base.parent / f"vllm-{version}.dist-info/RECORD").unlink()
    with pytest.raises(BuildRefused, match="RECORD does not list its files; use the base of"):
        assemble.check_base(version, digest)


def test_patched_files_come_with_their_bytecode(base: Path) -> None:
    status = patchstack.apply()
    files = assemble.patch_files(status)
    for path in status.series.paths:
        file = status.package.file(path)
        assert {file, Path(importlib.util.cache_from_source(str(file)))} <= files
    record = next(iter((status.package.path / ".stagetap").iterdir()))
    assert load_series(record).digest == status.series.digest
    assert record / "lock.json" in files
    assert all(file.is_file() for file in files)


def test_a_file_that_does_not_compile_is_named(base: Path) -> None:
    status = patchstack.apply()
    file = status.package.file(status.series.paths[0])
    file.write_text("def broken(:\n")
    with pytest.raises(BuildRefused, match=f"{file.name} does not compile"):
        assemble.patch_files(status)


def test_arguments_that_were_not_given_are_named() -> None:
    told = {"vllm": "0.32.0", "python": "3.12", "series": "ab", "mooncake": "m"}
    assemble.check_told(Namespace(**told))
    with pytest.raises(BuildRefused, match=r"not told PYTHON_VERSION, SERIES; build with `just"):
        assemble.check_told(Namespace(**told | {"python": "", "series": ""}))


def test_another_python_is_refused() -> None:
    assemble.check_python(".".join(map(str, sys.version_info[:2])))
    with pytest.raises(BuildRefused, match=r"bases\.lock says 3\.9"):
        assemble.check_python("3.9")
