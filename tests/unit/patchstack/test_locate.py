"""Finding vLLM without importing it, and the series of this StageTap."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagetap.errors import Refused
from stagetap.patchstack.locate import find_vllm, patches_root, pinned_versions
from unit.patchstack.synthetic import PRISTINE, make_package


def test_the_package_or_the_folder_above_can_be_named(vllm: Path) -> None:
    assert find_vllm(vllm) == find_vllm(vllm.parent)
    assert find_vllm(vllm).version == "0.32.0"


def test_a_package_under_another_name_is_mapped(tmp_path: Path, vllm: Path) -> None:
    renamed = vllm.rename(tmp_path / "vllm-copy")
    assert find_vllm(renamed).file("vllm/config/model.py") == renamed / "config/model.py"


@pytest.mark.parametrize("written", ["0.32.0", "0.32.0+cpu", "0.32.0+cu130.g123"])
def test_the_local_part_of_a_version_is_dropped(tmp_path: Path, written: str) -> None:
    version = {"vllm/_version.py": f"__version__ = version = {written!r}\n".encode()}
    assert find_vllm(make_package(tmp_path / "other", PRISTINE | version)).version == "0.32.0"


def test_a_folder_without_a_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="is no vLLM package"):
        find_vllm(tmp_path)


def test_a_package_without_a_version_is_refused(vllm: Path) -> None:
    for said in (b"", b"version = '\xff'"):
        (vllm / "_version.py").write_bytes(said)
        with pytest.raises(Refused, match="does not say its version"):
            find_vllm(vllm)


def _find_in_fresh_python(folder: Path) -> subprocess.CompletedProcess[str]:
    plugin = Path(__file__).parents[3] / "plugin"
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from stagetap.patchstack.locate import find_vllm\n"
        "print(find_vllm().path, 'vllm' in sys.modules, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-S", "-E", "-c", code, str(folder), str(plugin)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_importable_vllm_is_found_without_importing_it(vllm: Path) -> None:
    (vllm / "__init__.py").write_text("raise RuntimeError('imported')\n")
    assert _find_in_fresh_python(vllm.parent).stdout == f"{vllm} False False\n"


def test_what_an_uninstallation_left_is_no_vllm(tmp_path: Path) -> None:
    (tmp_path / "vllm/.stagetap").mkdir(parents=True)
    assert "no vLLM can be imported here" in _find_in_fresh_python(tmp_path).stderr


def test_this_stagetap_has_its_series() -> None:
    assert "0.32.0" in pinned_versions(patches_root())


def test_versions_are_ordered_as_numbers(tmp_path: Path) -> None:
    for version in ("0.32.0", "0.9.2", "0.33.0"):
        (tmp_path / "vllm" / version).mkdir(parents=True)
    assert pinned_versions(tmp_path) == ["0.9.2", "0.32.0", "0.33.0"]
