"""A package is what its wheel installed, or what is not so has a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetap.patchstack.gitrun import write_files
from stagetap.patchstack.locate import find_vllm
from stagetap.patchstack.wheel import python_sources, unlike_release
from unit.patchstack.synthetic import PRISTINE, VERSION, record_of

INFO = f"vllm-{VERSION}.dist-info"


def _found(vllm: Path) -> list[str]:
    package = find_vllm(vllm)
    return unlike_release(package, python_sources(package))


def test_a_package_as_installed_has_no_fault(vllm: Path) -> None:
    """pip's own files, byte code, and lines of RECORD that have no digest or lead elsewhere."""
    own = [f"{INFO}/{name}" for name in ("INSTALLER", "REQUESTED", "direct_url.json")]
    pyc = "vllm/__pycache__/envs.cpython-311.pyc"
    write_files(vllm.parent, dict.fromkeys([*own, pyc, "vllm/_C.so"], b""))
    record = vllm.parent / INFO / "RECORD"
    listed = [*own, pyc, "../../bin/vllm", "vllm/_D.so", "other/x.py"]
    lines = record_of(PRISTINE) + "".join(f"{path},,\n" for path in listed).encode()
    record.write_bytes(lines)
    write_files(vllm.parent, {"vllm_plugin-1.0.dist-info/RECORD": b"vllm_plugin/x.py,,\n"})
    assert _found(vllm) == []


@pytest.mark.parametrize(
    ("path", "data", "said"),
    [
        ("vllm/envs.py", b"edited", "vllm/envs.py is not what its wheel installed"),
        ("vllm/envs.py", None, "vllm/envs.py is missing"),
        ("vllm/config/more.py", b"", "vllm/config/more.py is in no RECORD of its wheel"),
    ],
)
def test_each_file_that_differs_is_named(
    vllm: Path, path: str, data: bytes | None, said: str
) -> None:
    (vllm.parent / path).unlink(missing_ok=True)
    write_files(vllm.parent, {path: data})
    assert _found(vllm) == [said]


@pytest.mark.parametrize("data", [None, b"", b"other/x.py,,\n"])
def test_without_a_record_of_its_files_nothing_passes(vllm: Path, data: bytes | None) -> None:
    (vllm.parent / INFO / "RECORD").unlink()
    write_files(vllm.parent, {f"{INFO}/RECORD": data})
    (said,) = _found(vllm)
    assert said == f"{vllm.parent}/vllm*.dist-info/RECORD does not list its files"


@pytest.mark.parametrize("data", [b"\xff\xfe", b"vllm/envs.py\n", b"a,b,c,d\n"])
def test_a_damaged_record_is_named(vllm: Path, data: bytes) -> None:
    record = vllm.parent / INFO / "RECORD"
    record.write_bytes(record_of(PRISTINE) + data)
    (said,) = _found(vllm)
    assert said.startswith(f"{record} is damaged (")


@pytest.mark.parametrize("path", list(PRISTINE))
def test_a_line_taken_out_of_the_record_is_noticed(vllm: Path, path: str) -> None:
    listed = {name: data for name, data in PRISTINE.items() if name != path}
    (vllm.parent / INFO / "RECORD").write_bytes(record_of(listed))
    assert _found(vllm) == [f"{path} is in no RECORD of its wheel"]


def test_a_link_to_a_package_has_no_record_there(tmp_path: Path, vllm: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "vllm"
    elsewhere.parent.mkdir()
    vllm.rename(elsewhere)
    vllm.symlink_to(elsewhere)
    (said,) = _found(vllm)
    assert said.startswith(f"{elsewhere.parent}/vllm*.dist-info/RECORD")
