"""``python -m surface VERSION``: what the plugin uses and that release does not have."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import stagetap
from stagetap.patchstack.locate import patches_root
from stagetap.patchstack.releases import default_cache
from stagetap.patchstack.series import read_series
from stagetap.patchstack.sources import released_files
from stagetap.patchstack.tree import patched_contents
from surface.check import Report, check
from surface.sources import Plugin


def check_release(version: str) -> Report:
    """The plugin of this checkout against a pinned release with its series."""
    series = read_series(patches_root() / "vllm" / version)
    released = released_files(version, default_cache())
    pristine = {path: released.get(path) for path in series.paths}
    return check(Plugin(plugin_sources(), {**released, **patched_contents(pristine, series)}))


def plugin_sources() -> Mapping[str, bytes]:
    """Every Python file of the plugin by its path in the package."""
    root = Path(stagetap.__file__).parent
    return {
        f"stagetap/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*.py"))
    }


if __name__ == "__main__":
    found = check_release(sys.argv[1])
    print(*found.findings, sep="\n")
    print(f"vLLM {sys.argv[1]}: {found.counts()}; {len(found.findings)} findings")
    sys.exit(bool(found.findings))
