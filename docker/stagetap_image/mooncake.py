"""Which build of Mooncake a base needs, and whether its libraries resolve there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from stagetap.stores.mooncake_package import DISTRIBUTIONS
from stagetap_image.errors import BuildRefused
from stagetap_image.packages import Packages

_CUDA = re.compile(r"^cuda\b[^=]*= (?:None|'(\d+)[\d.]*')$", re.MULTILINE)
_UNRESOLVED = re.compile(r"^\s*(\S+) => not found$", re.MULTILINE)
_USED = re.compile(r"(?:^|/)(?:_?store[^/]*\.so|mooncake_master|mooncake_client)$")

DRIVER = frozenset({"libcuda.so.1", "libnvidia-ml.so.1"})
"""Libraries of the GPU's driver: the container runtime brings them, no image has them."""


def distribution_for(cuda: int | None) -> str:
    """The name of Mooncake's package for a major version of CUDA; None is a base without it.

    Raises BuildRefused for a CUDA that no build of Mooncake is for.
    """
    names = {None: DISTRIBUTIONS[0], 12: DISTRIBUTIONS[1], 13: DISTRIBUTIONS[2]}
    if cuda not in names:
        raise BuildRefused(f"no build of Mooncake is for CUDA {cuda}; there are some for 12 and 13")
    return names[cuda]


def cuda_of_torch() -> int | None:
    """The major version of CUDA that the base's torch was built for, without importing it.

    Raises BuildRefused when there is no torch, or none that says so.
    """
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildRefused("the base has no torch, so its CUDA cannot be told")
    file = Path(spec.origin).with_name("version.py")
    found = _CUDA.search(file.read_text("utf-8")) if file.is_file() else None
    if found is None:
        raise BuildRefused(f"{file} does not say for which CUDA torch was built")
    return int(found[1]) if found[1] else None


def check_choice(wanted: str, cuda: int | None, before: Packages) -> None:
    """Whether the package that bases.lock names is the one for this base.

    Raises BuildRefused when it is for another CUDA, or when the base has another build already:
    they share their files, and one would overwrite the other.
    """
    if (right := distribution_for(cuda)) != wanted:
        torch = f"for CUDA {cuda}" if cuda else "without CUDA"
        raise BuildRefused(
            f"the base's torch is built {torch} and needs {right}; bases.lock names {wanted}"
        )
    for name in DISTRIBUTIONS:
        if name in before and name != wanted:
            raise BuildRefused(f"the base has {name}, whose files {wanted} would overwrite")


def check_libraries(files: Iterable[Path]) -> list[Path]:
    """Look at what the store loads of Mooncake's files, and return these.

    Raises BuildRefused, naming file and library, for one that does not resolve.
    """
    used = sorted(file for file in files if _USED.search(file.as_posix()) and _is_elf(file))
    for file in used:
        if missing := [name for name in unresolved(file) if name not in DRIVER]:
            raise BuildRefused(
                f"{file} needs {missing[0]}, which the base does not have; add its Debian package "
                "to LIBRARIES of docker/Dockerfile"
            )
    return used


def unresolved(file: Path) -> list[str]:
    """The libraries that the dynamic loader does not find for this file.

    Raises BuildRefused when the loader cannot read it.
    """
    done = subprocess.run(["ldd", str(file)], capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildRefused(f"ldd {file}: {done.stderr.strip() or done.stdout.strip()}")
    return _UNRESOLVED.findall(done.stdout)


def _is_elf(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"
