"""The Python files of a release as it came: of the vLLM at hand where it is that one, else kept."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stagetap.errors import Refused
from stagetap.patchstack.gitrun import Contents
from stagetap.patchstack.locate import find_vllm
from stagetap.patchstack.operations import pristine_package
from stagetap.patchstack.releases import kept_release, release
from stagetap.patchstack.wheel import python_sources, unlike_release


def released_files(version: str, cache: Path, vllm: Path | None = None) -> Contents:
    """Every Python file of vLLM ``version``, by patch path, without any patch of ours.

    Raises:
        Refused: the vLLM at hand is that release, but changed by somebody else; or see ``release``.
        Unreachable: the release must be downloaded and no package index answered.
    """
    files = files_at_hand(version, cache, vllm)
    return files if files is not None else python_sources(release(version, cache))


def fetch_missing(versions: Iterable[str], cache: Path) -> None:
    """Download the releases that ``released_files`` would have to; pip shows how far it is.

    Raises like ``released_files``.
    """
    for version in versions:
        if not _is_at_hand(version, None):
            release(version, cache)


def files_at_hand(version: str, cache: Path, vllm: Path | None = None) -> Contents | None:
    """As ``released_files``, but None where the release would have to be downloaded."""
    if _is_at_hand(version, vllm):
        return pristine_files(vllm)
    kept = kept_release(version, cache)
    return None if kept is None else python_sources(kept)


def pristine_files(vllm: Path | None = None) -> Contents:
    """Every Python file of the package as released, whatever series is applied to it.

    Raises Refused when a file is neither as released nor patched by StageTap.
    """
    package, _, touched = pristine_package(vllm)
    files = {**python_sources(package), **touched}
    if differing := unlike_release(package, files):
        raise Refused(
            f"{package.path} is neither as released nor patched by StageTap: {differing[0]}; "
            "reinstall it, or name a vLLM that is with --vllm PATH"
        )
    return files


def _is_at_hand(version: str, vllm: Path | None) -> bool:
    try:
        return find_vllm(vllm).version == version
    except Refused:
        if vllm is not None:
            raise
        return False  # no vLLM can be imported here
