"""The Python files of a vLLM release, fetched by the wheel's name through pip and kept in a cache.

Only Python files and the wheel's own records are kept; its native libraries cannot be needed to
read, patch or compile them. pip checks the download, and the wheel's RECORD what was unpacked.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from stagetap.errors import Refused, StageTapError
from stagetap.patchstack.locate import Package, check_version, find_vllm
from stagetap.patchstack.wheel import python_sources, unlike_release

_AGAIN = "remove the folder, so that it is fetched again"
_KEPT = (".py", "/RECORD", "/METADATA", "/WHEEL")


class Unreachable(StageTapError):
    """No package index answered; nothing is said about the release."""


def default_cache() -> Path:
    """Where unpacked releases are kept between commands."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stagetap" / "vllm"


def kept_release(version: str, cache: Path) -> Package | None:
    """The release in the cache, as its wheel had it; None when it is not there.

    Raises Refused when files in the cache are not those of the wheel.
    """
    folder = cache / check_version(version)
    if not (folder / "vllm" / "__init__.py").is_file():
        return None
    return _checked(folder, version)


def release(version: str, cache: Path) -> Package:
    """The release, downloaded when the cache does not hold it.

    Raises:
        Unreachable: no package index answered.
        Refused: there is no such release for this platform, pip is missing, or the files of the
            wheel are not those of its RECORD.
    """
    kept = kept_release(version, cache)
    return kept if kept is not None else _fetch(version, cache)


def unpack_sources(wheel: Path, folder: Path) -> None:
    """Put the Python files of ``wheel`` and its records below ``folder``.

    Raises Refused when the file is no wheel or a name in it leads out of the folder.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if ".." in name.split("/") or name.startswith("/"):
                    raise Refused(f"{wheel.name} names {name!r}, which leads out of the wheel")
                if name.endswith(_KEPT):
                    archive.extract(name, folder)
    except zipfile.BadZipFile as error:
        raise Refused(f"{wheel} is no wheel: {error}; remove it and try again") from error


def explain_failure(version: str, said: str) -> StageTapError:
    """What pip's message about a failed download means."""
    versions = re.search(r"\(from versions: ([^)]*)\)", said)
    if versions is not None and versions[1] != "none":
        newest = ", ".join(versions[1].split(", ")[-4:])
        return Refused(f"no wheel of vLLM {version} is published for this platform; try {newest}")
    last = said.strip().splitlines()[-1] if said.strip() else "pip said nothing"
    return Unreachable(
        f"the wheel of vLLM {version} cannot be fetched: {last}; check the network, or unpack the "
        f"wheel into a folder {version}/ and name the folder around it with --sources"
    )


def _fetch(version: str, cache: Path) -> Package:
    if find_spec("pip") is None:
        raise Refused(
            f"pip is needed to fetch vLLM {version}; install pip, or unpack the wheel into a "
            f"folder {version}/ and name the folder around it with --sources"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as temporary:
        folder = Path(temporary)
        wheel = _download(version, folder / "wheel")
        unpack_sources(wheel, folder / "unpacked")
        _checked(folder / "unpacked", version)
        target = cache / version
        shutil.rmtree(target, ignore_errors=True)  # what a killed command may have left
        os.replace(folder / "unpacked", target)
    return find_vllm(target)


def _download(version: str, folder: Path) -> Path:
    """pip draws its progress bar on our stderr: stdout is for results."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    command += ["--no-input", "--no-cache-dir", "--retries", "2", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = sorted(folder.glob("vllm-*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise explain_failure(version, done.stderr)
    return wheels[0]


def _checked(folder: Path, version: str) -> Package:
    try:
        package = find_vllm(folder)
    except Refused:
        raise Refused(f"{folder}: vllm/_version.py does not say a version; {_AGAIN}") from None
    if package.version != version:
        raise Refused(
            f"{package.path.parent} holds vLLM {package.version}, not {version}; {_AGAIN}"
        )
    if differing := unlike_release(package, python_sources(package)):
        raise Refused(f"{package.path.parent}: {differing[0]}; {_AGAIN}")
    return package
