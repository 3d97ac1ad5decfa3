"""Which build of Mooncake a base needs, and libraries that do not resolve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from stagetap_image import mooncake
from stagetap_image.errors import BuildRefused
from stagetap_image.mooncake import (
    check_choice,
    check_libraries,
    cuda_of_torch,
    distribution_for,
    unresolved,
)
from stagetap_image.packages import Package

CPU, CUDA12, CUDA13 = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)


def test_one_build_for_each_cuda() -> None:
    assert [distribution_for(cuda) for cuda in (None, 12, 13)] == [CPU, CUDA12, CUDA13]
    with pytest.raises(BuildRefused, match="CUDA 14"):
        distribution_for(14)


def test_the_lock_must_name_the_right_one() -> None:
    check_choice(CUDA13, 13, {})
    check_choice(CUDA13, 13, {CUDA13: Package("0.3.14", frozenset())})
    with pytest.raises(BuildRefused, match=f"CUDA 13 and needs {CUDA13}; bases.lock names {CPU}"):
        check_choice(CPU, 13, {})
    with pytest.raises(BuildRefused, match=f"without CUDA and needs {CPU}"):
        check_choice(CUDA13, None, {})
    with pytest.raises(BuildRefused, match=f"the base has {CUDA12}, whose files"):
        check_choice(CUDA13, 13, {CUDA12: Package("0.3.14", frozenset())})


@pytest.mark.parametrize(
    ("line", "cuda"),
    [
        ("cuda: Optional[str] = '13.0'", 13),
        ("cuda = '12.9'", 12),
        ("cuda: Optional[str] = None", None),
    ],
)
def test_cuda_is_read_from_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, cuda: int | None
) -> None:
    torch = _torch(tmp_path, monkeypatch)
    (torch / "version.py").write_text(f"__all__ = ['cuda']\ndebug = False\n{line}\nhip = None\n")
    assert cuda_of_torch() == cuda


def test_a_torch_that_does_not_say_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = _torch(tmp_path, monkeypatch)
    with pytest.raises(BuildRefused, match="does not say"):
        cuda_of_torch()
    (torch / "version.py").write_text("cuda = unknown\n")
    with pytest.raises(BuildRefused, match="does not say"):
        cuda_of_torch()


def test_a_base_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "find_spec", lambda name: None)
    with pytest.raises(BuildRefused, match="no torch"):
        cuda_of_torch()


def test_only_what_the_store_loads_is_looked_at(tmp_path: Path) -> None:
    program = tmp_path / "mooncake_master"
    program.write_bytes(Path(sys.executable).resolve().read_bytes())
    script = tmp_path / "bin" / "mooncake_client"
    script.parent.mkdir()
    script.write_text("#!/usr/bin/python3\n")
    other = tmp_path / "nvlink_allocator.so"
    other.write_bytes(b"\x7fELF, but not read")
    assert check_libraries({program, script, other}) == [program]


def test_a_library_that_does_not_resolve_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "_store.cpython-312-x86_64-linux-gnu.so"
    library.write_bytes(b"\x7fELF")
    missing = ["libcuda.so.1"]
    monkeypatch.setattr(mooncake, "unresolved", lambda file: missing)
    assert check_libraries({library}) == [library]  # the driver comes with the machine
    missing.append("libmlx5.so.1")
    with pytest.raises(BuildRefused, match=r"_store.* needs libmlx5\.so\.1"):
        check_libraries({library})


def test_what_the_loader_cannot_read_is_refused(tmp_path: Path) -> None:
    assert unresolved(Path(sys.executable).resolve()) == []
    broken = tmp_path / "store.so"
    broken.write_bytes(b"\x7fELF")
    with pytest.raises(BuildRefused, match="ldd"):
        unresolved(broken)


def _torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty ``torch`` package that imports find first."""
    torch = folder / "torch"
    torch.mkdir()
    (torch / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return torch
