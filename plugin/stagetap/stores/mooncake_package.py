"""Mooncake's Python package: is it there, new enough, does it load; and how it has to be told."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

from stagetap.errors import Refused

# One package under several names: for CPUs, for CUDA 12 and for CUDA 13.
DISTRIBUTIONS = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
LEAST_VERSION = "0.3.12.post1"

DEBIAN_PACKAGES = {
    "libibverbs": "libibverbs1",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "liburing": "liburing2",
}
CUDA_PACKAGES = {"libmlx5": "ibverbs-providers", "libcurl": "libcurl4"}
"""What the builds for CUDA load beside those, from 0.3.14 on."""

_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:\.post(\d+))?")
_MISSING_LIBRARY = re.compile(r"\b(lib[\w+-]+)\.so[.\d]*: cannot open shared object")
_INSTALL = 'pip install "stagetap[mooncake-cpu]", or on CUDA 13 "stagetap[mooncake-cuda13]"'


def load_mooncake() -> ModuleType:
    """The module `mooncake.store`. Raises Refused, with the cure, when it cannot be had."""
    check_version()
    try:
        return importlib.import_module("mooncake.store")
    except (ImportError, OSError) as error:
        raise Refused(_load_failure(str(error))) from None


def check_version() -> str:
    """The installed version. Raises Refused when there is none, or one that loses data."""
    found = None
    for name in DISTRIBUTIONS:
        try:
            found = (name, version(name))
        except PackageNotFoundError:
            continue
        break
    if found is None:
        raise Refused(f"the mooncake store needs Mooncake, which is not installed: {_INSTALL}")
    if _ordered(found[1]) < _ordered(LEAST_VERSION):
        raise Refused(
            f"{found[0]} {found[1]} is too old: before {LEAST_VERSION} a write could be reported "
            f'done too early: pip install -U "{found[0]}>={LEAST_VERSION}"'
        )
    return found[1]


def find_program(name: str) -> str:
    """The path of `mooncake_master` or `mooncake_client`. Raises Refused when it is not there."""
    check_version()
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise Refused(f"{name} is not beside {sys.executable} and not on PATH: {_INSTALL}")
    return found


def family_environment(host: str) -> dict[str, str]:
    """What tells Mooncake to use IPv6 where this host's address is one: by itself it does not."""
    return {"MC_USE_IPV6": "1"} if ":" in host else {}


def tell_library(rpc_timeout_s: float, host: str) -> None:
    """Before it is loaded. What the environment says already stays as it is.

    `host` is the address at which this process is reached. The rest bounds what cannot be
    interrupted.

    Setting up and closing a client hold up the whole process; without these bounds for minutes,
    when the master goes away meanwhile. The first client of a process decides.
    """
    for name, value in (
        ("MC_STORE_CLIENT_SETUP_RETRIES", "1"),
        ("MC_RPC_TIMEOUT_MS", str(max(1, round(1000 * rpc_timeout_s)))),
        ("MC_LOG_LEVEL", "ERROR"),
        ("GLOG_minloglevel", "2"),
        *family_environment(host).items(),
    ):
        os.environ.setdefault(name, value)


def _load_failure(message: str) -> str:
    missing = _MISSING_LIBRARY.search(message)
    if missing is None:
        return f"Mooncake does not load: {' '.join(message.split())}"
    library = missing.group(1)
    if library in DEBIAN_PACKAGES:
        cure = f"apt-get install {' '.join(DEBIAN_PACKAGES.values())}"
    elif library in CUDA_PACKAGES:
        cure = f"apt-get install {' '.join(CUDA_PACKAGES.values())}"
    elif library.startswith(("libcu", "libnv")):
        cure = f"this build is for another CUDA, or there is none here: {_INSTALL}"
    else:
        cure = f"install the package of your distribution that holds {library}.so"
    return f"Mooncake does not load, {library} is missing: {cure}"


def _ordered(text: str) -> tuple[int, ...]:
    """Versions in order; one that cannot be read comes before all others, and so is refused."""
    parts = _VERSION.match(text)
    return tuple(int(part or 0) for part in parts.groups()) if parts else ()
