"""What an installation did to the packages of the base: it may add, and nothing else."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from stagetap_image.errors import BuildRefused


@dataclass(frozen=True)
class Package:
    """An installed distribution: its version, and the files that its RECORD names."""

    version: str
    files: frozenset[Path]


Packages = Mapping[str, Package]
"""By normalized name."""


def installed_packages(path: list[str] | None = None) -> Packages:
    """The distributions that Python finds now, those of ``path`` alone when it is given.

    The first of a name counts, as it does for imports. Raises BuildRefused for one whose METADATA
    is missing or says no name or version.
    """
    importlib.invalidate_caches()
    found: dict[str, Package] = {}
    for one in distributions() if path is None else distributions(path=path):
        if not (one.metadata and one.metadata["Name"] and one.metadata["Version"]):
            raise BuildRefused(
                f"{one.locate_file('')}: {_info(one)} does not say name and version; remove it, or "
                "install its package anew"
            )
        found.setdefault(normalized(one.name), Package(one.version, _files(one)))
    return found


def constraints(packages: Packages) -> str:
    """A constraints file for pip that lets no package move."""
    return "".join(f"{name}=={package.version}\n" for name, package in sorted(packages.items()))


def added_packages(before: Packages, after: Packages) -> Packages:
    """The packages that only ``after`` has.

    Raises BuildRefused when a package of the base is gone or another version, or when an added one
    has a file that belongs to it.
    """
    for name, package in sorted(before.items()):
        if name not in after:
            raise BuildRefused(f"the installation removed {name} {package.version} of the base")
        if (version := after[name].version) != package.version:
            raise BuildRefused(f"the installation moved {name} from {package.version} to {version}")
    added = {name: package for name, package in after.items() if name not in before}
    owners = {file: name for name, package in before.items() for file in package.files}
    for name, package in sorted(added.items()):
        if shared := sorted(package.files & owners.keys()):
            raise BuildRefused(
                f"{name} {package.version} overwrites {shared[0]}, which belongs to "
                f"{owners[shared[0]]} of the base"
            )
    return added


def normalized(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _info(distribution: Distribution) -> str:
    """The name of its ``.dist-info``, which is not part of its interface."""
    path = getattr(distribution, "_path", None)
    return "the METADATA of a package" if path is None else str(path.name)


def _files(distribution: Distribution) -> frozenset[Path]:
    named: Iterable[Path] = (Path(str(file.locate())) for file in distribution.files or ())
    return frozenset(file.parent.resolve() / file.name for file in named)
