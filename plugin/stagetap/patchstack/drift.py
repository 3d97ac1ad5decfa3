"""How far releases have moved away from a series: what each patch meets in each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from stagetap.patchstack.gitrun import Contents
from stagetap.patchstack.rebase import Carried, carry_over, start_rebase
from stagetap.patchstack.series import Series

Drift = Mapping[str, Sequence[Carried]]
"""What became of the patches, in their order, by version."""


def measure_drift(
    series: Series,
    pristine: Contents,
    versions: Iterable[str],
    files_of: Callable[[str], Contents],
    progress: Callable[[str], None] = lambda _: None,
) -> Drift:
    """Carry the series over to each version, and throw the result away.

    Args:
        series: of one release.
        pristine: the Python files of that release.
        versions: the other ones.
        files_of: gives the Python files of a version, when it is its turn.
        progress: is told the version and the patch.

    Raises GitError when git refuses something that is no conflict.
    """
    found: dict[str, list[Carried]] = {}
    with tempfile.TemporaryDirectory(prefix="stagetap-drift-") as temporary:
        folder = Path(temporary).resolve() / "vllm"
        start_rebase(folder, pristine, series)
        for version in versions:
            progress(f"vLLM {version}")
            found[version] = []
            for carried in carry_over(folder, series, files_of(version), version):
                progress(f"vLLM {version}: {carried.patch} {carried.fate}")
                found[version].append(carried)
    return found


def describe(carried: Carried) -> str:
    """One cell: ``offset 54, +3 -0 left``."""
    fate = f"offset {carried.offset}" if carried.fate == "offset" else carried.fate
    if carried.fate == "absorbed":
        return fate
    if carried.conflicts:
        fate += f" ({sum(max(regions, 1) for regions in carried.conflicts.values())})"
    return f"{fate}, +{carried.added} -{carried.removed} left"


def drift_rows(drift: Drift) -> list[list[str]]:
    """A row a patch: its name, then one cell a version."""
    columns = [[describe(carried) for carried in column] for column in drift.values()]
    names = [carried.patch.removesuffix(".patch") for carried in next(iter(drift.values()), ())]
    return [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]


def render_drift(series: Series, drift: Drift) -> str:
    """The same in Markdown, with the sum of the lines that are left."""
    versions = list(drift)
    lines = [
        f"| patch of {series.version} | " + " | ".join(versions) + " |",
        "|---|" + "---|" * len(versions),
    ]
    lines += ["| " + " | ".join(row) + " |" for row in drift_rows(drift)]
    sums = [
        f"+{sum(one.added for one in column)} -{sum(one.removed for one in column)} left"
        for column in drift.values()
    ]
    own = f"+{sum(p.added for p in series.patches)} -{sum(p.removed for p in series.patches)}"
    lines.append(f"| **all: {own}** | " + " | ".join(sums) + " |")
    return "\n".join(lines)
