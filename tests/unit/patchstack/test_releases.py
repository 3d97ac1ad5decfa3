"""Releases of vLLM: unpacked from wheels, kept, checked, and what pip's failures mean."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from stagetap.errors import Refused
from stagetap.patchstack import releases
from stagetap.patchstack.operations import apply
from stagetap.patchstack.releases import (
    Unreachable,
    check_version,
    explain_failure,
    kept_release,
    release,
    unpack_sources,
)
from stagetap.patchstack.series import Series
from stagetap.patchstack.sources import files_at_hand, pristine_files, released_files
from stagetap.patchstack.wheel import python_sources
from unit.patchstack.synthetic import PRISTINE, record_of

VERSION = "0.33.0"
FILES = PRISTINE | {"vllm/_version.py": b"__version__ = version = '0.33.0'\n"}


def _wheel(folder: Path, more: Mapping[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        contents = {**FILES, f"vllm-{VERSION}.dist-info/RECORD": record_of(FILES), **(more or {})}
        for name, data in contents.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for pip: makes the wheel, and notes how it was called."""
    calls: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        _wheel(Path(command[command.index("--dest") + 1]), {"vllm/_C.abi3.so": b"native"})
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(releases, "subprocess", SimpleNamespace(run=run, PIPE=-1))
    return calls


def test_python_files_alone_are_kept(tmp_path: Path) -> None:
    unpack_sources(_wheel(tmp_path, {"vllm/_C.abi3.so": b"native"}), tmp_path / "out")
    unpacked = {path.name for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert unpacked == {"RECORD", *(Path(name).name for name in FILES)}


def test_a_release_is_fetched_once_by_its_name(tmp_path: Path, pip: list[list[str]]) -> None:
    cache = tmp_path / "cache"
    assert kept_release(VERSION, cache) is None
    package = release(VERSION, cache)
    assert python_sources(package) == FILES
    assert pip[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert pip[0][-1] == f"vllm=={VERSION}"
    assert release(VERSION, cache) == package
    assert len(pip) == 1
    assert [path.name for path in cache.iterdir()] == [VERSION], "nothing else is left behind"


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        ("vllm/envs.py", b"edited", r"vllm/envs\.py is not what its wheel installed"),
        ("vllm/envs.py", None, r"vllm/envs\.py is missing"),
        ("vllm/more.py", b"", r"vllm/more\.py is in no RECORD"),
        ("vllm/_version.py", b"", r"vllm/_version\.py does not say a version"),
        ("vllm/_version.py", b"version = '0.32.0'", r"holds vLLM 0\.32\.0, not 0\.33\.0"),
        (f"vllm-{VERSION}.dist-info/RECORD", None, "RECORD does not list its files"),
    ],
)
def test_what_is_not_the_wheel_in_the_cache_is_to_be_removed(
    tmp_path: Path, pip: list[list[str]], path: str, data: bytes | None, said: str
) -> None:
    release(VERSION, tmp_path)
    file = tmp_path / VERSION / path
    file.unlink(missing_ok=True)
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(Refused, match=f"{tmp_path}/{VERSION}.*{said}.*remove the folder, so that"):
        kept_release(VERSION, tmp_path)


def test_a_wheel_that_leads_out_of_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="leads out of the wheel"):
        unpack_sources(_wheel(tmp_path, {"vllm/../../x.py": b""}), tmp_path / "out")


def test_a_torn_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vllm.whl").write_bytes(b"PK torn")
    with pytest.raises(Refused, match="is no wheel"):
        unpack_sources(tmp_path / "vllm.whl", tmp_path / "out")


@pytest.mark.parametrize("version", ["", "../0.33.0", "latest", "0.33.0+cpu", "0.33.0/vllm"])
def test_what_is_no_release_is_refused(version: str) -> None:
    with pytest.raises(Refused, match="is no version of vLLM"):
        check_version(version)


def test_a_release_that_does_not_exist_names_those_that_do() -> None:
    said = "ERROR: Could not find a version (from versions: 0.1, 0.30.0, 0.31.0, 0.32.0, 0.33.0)"
    error = explain_failure("9.9.9", said)
    assert isinstance(error, Refused)
    assert "try 0.30.0, 0.31.0, 0.32.0, 0.33.0" in str(error)


@pytest.mark.parametrize("said", ["", "ERROR: Could not find a version (from versions: none)"])
def test_without_an_index_nothing_is_said_about_the_release(said: str) -> None:
    error = explain_failure(VERSION, said)
    assert isinstance(error, Unreachable)
    assert "--sources" in str(error)


def test_without_pip_the_way_by_hand_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "find_spec", lambda _: None)
    with pytest.raises(Refused, match=r"pip is needed .* --sources"):
        release(VERSION, tmp_path)


class TestSources:
    def test_a_patched_vllm_gives_the_files_as_released(
        self, vllm: Path, patches: Path, series: Series, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("stagetap.patchstack.operations.patches_root", lambda: patches)
        apply(vllm)
        files = released_files("0.32.0", Path("unused"), vllm)
        assert {path: data for path, data in files.items() if data is not None} == PRISTINE
        assert pristine_files(vllm) == files

    def test_another_release_comes_from_the_cache(
        self, tmp_path: Path, vllm: Path, pip: list[list[str]]
    ) -> None:
        assert files_at_hand(VERSION, tmp_path / "cache", vllm) is None
        assert not pip
        assert released_files(VERSION, tmp_path / "cache", vllm) == FILES
        assert files_at_hand(VERSION, tmp_path / "cache", vllm) == FILES
