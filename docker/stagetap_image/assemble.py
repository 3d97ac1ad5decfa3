"""Inside the base: check it, add the plugin, patch vLLM, and collect what came of it.

Runs with the base's own Python, in a stage of the build that is thrown away but for the overlay.
Each step either holds or ends the build with one line that says what is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import py_compile
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from stagetap import patchstack
from stagetap.errors import StageTapError
from stagetap.patchstack.operations import Status
from stagetap.patchstack.wheel import python_sources, unlike_release
from stagetap.stores.mooncake_package import LEAST_VERSION
from stagetap_image.errors import BuildRefused
from stagetap_image.mooncake import check_choice, check_libraries, cuda_of_torch
from stagetap_image.overlay import copy_overlay
from stagetap_image.packages import Packages, added_packages, constraints, installed_packages


def main() -> int:
    """Exit code 0, or 1 with a line on stderr."""
    asked = _arguments()
    try:
        check_told(asked)
        check_python(asked.python)
        check_base(asked.vllm, asked.series)
        before = installed_packages()
        check_choice(asked.mooncake, cuda_of_torch(), before)
        install(before, str(asked.source), f"{asked.mooncake}>={LEAST_VERSION}")
        after = installed_packages()
        added = added_packages(before, after)
        say(", ".join(f"{name} {package.version}" for name, package in sorted(added.items())))
        used = check_libraries(after[asked.mooncake].files)
        say(f"the libraries of {', '.join(file.name for file in used)} resolve")
        status = patchstack.apply()
        patched = patch_files(status)
        say(f"{len(status.series.paths)} files of vLLM patched and compiled")
        files = {file for package in added.values() for file in package.files}
        size_bytes = copy_overlay({*files, *patched}, asked.overlay)
        say(f"{size_bytes:,} bytes to add to the base")
    except (BuildRefused, StageTapError) as error:
        print(f"image: refused: {error}", file=sys.stderr)
        return 1
    return 0


def check_told(asked: argparse.Namespace) -> None:
    """Raises BuildRefused, naming the build arguments that have no default and were not given."""
    told = {
        "VLLM_VERSION": asked.vllm,
        "PYTHON_VERSION": asked.python,
        "SERIES": asked.series,
        "MOONCAKE": asked.mooncake,
    }
    if missing := [name for name, value in told.items() if not value]:
        raise BuildRefused(
            f"the build is not told {', '.join(missing)}; build with `just image`, whose --print "
            "shows a whole `docker build` command"
        )


def check_python(wanted: str) -> None:
    """Raises BuildRefused when this is another Python than bases.lock says."""
    found = ".".join(map(str, sys.version_info[:2]))
    if found != wanted:
        raise BuildRefused(f"the base runs Python {found}; bases.lock says {wanted}")


def check_base(version: str, series_sha256: str) -> None:
    """The vLLM that Python imports is the released one: where it is to be patched as the lock of
    the series has it, everywhere else as its wheel's RECORD has it.

    Raises BuildRefused, naming the first file that differs; Refused for a vLLM that has no series.
    """
    found = patchstack.status()
    package = found.package
    if package.version != version:
        raise BuildRefused(f"{package.path} is vLLM {package.version}; bases.lock says {version}")
    if found.series.digest != series_sha256:
        raise BuildRefused(
            f"the series of these sources is {found.series.digest}, the image is to be labelled "
            f"{series_sha256 or 'with none'}: build with `just image`"
        )
    for path, state in sorted(found.files.items()):
        if state != "pristine":
            raise BuildRefused(
                f"{package.path} is not vLLM {version} as released: {path} is {state}; use the "
                "base of bases.lock"
            )
    sources = python_sources(package)
    if differing := unlike_release(package, sources):
        raise BuildRefused(
            f"{package.path} is not vLLM {version} as released: {differing[0]}; use the base of "
            "bases.lock"
        )
    say(f"vLLM {version} at {package.path} is as released, {len(sources)} files compared")


def install(before: Packages, *requirements: str) -> None:
    """``pip install`` beside the packages of the base, none of which may move.

    Raises BuildRefused when pip finds no way, or is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        frozen = Path(folder, "base.txt")
        frozen.write_text(constraints(before))
        command = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-input"]
        command += ["--quiet", "--disable-pip-version-check", "--root-user-action", "ignore"]
        command += ["--constraint", str(frozen), *requirements]
        environment = {**os.environ, "PIP_BREAK_SYSTEM_PACKAGES": "1"}
        environment.pop("PYTHONPATH")  # the sources are no part of the base
        if subprocess.run(command, env=environment).returncode != 0:
            raise BuildRefused(
                "pip cannot install beside the packages of the base; see its message"
            )


def patch_files(status: Status) -> set[Path]:
    """What patching left behind: the patched files, their bytecode, and the record of the series.

    Raises BuildRefused for a file that does not compile.
    """
    package = status.package
    patched = [package.file(path) for path in status.series.paths]
    records = (file for file in (package.path / ".stagetap").rglob("*") if file.is_file())
    return {*patched, *_compiled(patched), *records}


def _compiled(files: Iterable[Path]) -> list[Path]:
    for file in files:
        try:
            py_compile.compile(str(file), doraise=True)
        except py_compile.PyCompileError as error:
            raise BuildRefused(f"{file} does not compile: {error.msg.strip()}") from None
    return [Path(importlib.util.cache_from_source(str(file))) for file in files]


def say(text: str) -> None:
    """One line of the build's log."""
    print(f"image: {text}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="the sources of StageTap")
    parser.add_argument("--overlay", type=Path, required=True, help="a new folder for the result")
    parser.add_argument("--vllm", required=True, help="the version of the base's vLLM")
    parser.add_argument("--python", required=True, help="the version of the base's Python")
    parser.add_argument(
        "--series", required=True, help="the digest that the image is labelled with"
    )
    parser.add_argument("--mooncake", required=True, help="the name of Mooncake's package")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
