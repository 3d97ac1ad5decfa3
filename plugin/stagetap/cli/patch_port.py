"""``stagetap patch rebase`` and ``drift``: the series and other releases of vLLM."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stagetap.cli.arguments import JsonOption
from stagetap.cli.folders import write_file
from stagetap.cli.output import activity, print_json, results, table
from stagetap.errors import Refused
from stagetap.patchstack.drift import describe, drift_rows, measure_drift, render_drift
from stagetap.patchstack.locate import check_version, patches_root, pinned_versions
from stagetap.patchstack.rebase import Carried, carry_over, finish_rebase, start_rebase
from stagetap.patchstack.releases import default_cache
from stagetap.patchstack.series import Series, read_series, write_series
from stagetap.patchstack.sources import fetch_missing, released_files
from stagetap.patchstack.table import put_block
from stagetap.patchstack.workshop import export_repository
from stagetap.stores.file_io import naming

SourcesOption = Annotated[
    Path | None,
    typer.Option(
        "--sources",
        help="Where unpacked releases are kept, a folder VERSION/vllm each; default: a cache.",
    ),
]
FromOption = Annotated[
    str | None, typer.Option("--from", help="Whose series; default: the newest other pin.")
]


def rebase_command(
    to: Annotated[str, typer.Option("--to", help="The vLLM release to carry the series to.")],
    from_version: FromOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write the series; default: patches/vllm/VERSION."),
    ] = None,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="A new folder for the repository in which conflicts resolve."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a series that exists.")
    ] = False,
    sources: SourcesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Carry the series to another release. Exit code 1 when something conflicts.

    Every patch is merged three-way with git. A patch that conflicts is written with conflict
    markers, which `stagetap patch apply` and `lint` refuse.
    """
    check_version(to)
    series = _series(from_version, other_than=to)
    target = out or patches_root() / "vllm" / to
    if (target / "series").exists() and not force:
        raise Refused(f"{target} holds a series already; give --force or another --out")
    cache = sources or default_cache()
    fetch_missing((series.version, to), cache)
    folder = _work_folder(work)
    try:
        with activity() as say:
            say(f"the files of vLLM {series.version} and {to}")
            old, new = (released_files(version, cache) for version in (series.version, to))
            start_rebase(folder, old, series)
            carried = []
            for one in carry_over(folder, series, new, to):
                carried.append(one)
                say(f"{one.patch}: {describe(one)}")
        finish_rebase(folder)
        rebased = export_repository(folder)
        with naming("write the series to", str(target)):
            write_series(rebased, target)
    except BaseException:
        _remove(folder, work)
        raise
    conflicts = [one for one in carried if one.conflicts]
    kept = bool(conflicts) or work is not None
    if not kept:
        _remove(folder, work)
    if as_json:
        print_json(
            {
                "from": series.version,
                "to": to,
                "out": str(target),
                "series_sha256": rebased.digest,
                "patches": [one.document() for one in carried],
                "conflicts": len(conflicts),
                "work": str(folder) if kept else None,
            }
        )
    else:
        _show_rebase(carried, target, folder)
    if conflicts:
        raise typer.Exit(1)


def drift_command(
    versions: Annotated[
        str | None,
        typer.Option("--versions", help="Releases, such as 0.31.0,0.33.0; default: other pins."),
    ] = None,
    from_version: FromOption = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Put the table between the markers of this Markdown file."),
    ] = None,
    sources: SourcesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what each patch meets in other releases: applies, offset, merges, conflicts, absorbed.

    A patch of which fewer lines are left is one that upstream has begun to take.
    """
    pinned = pinned_versions(patches_root())
    series = _series(from_version or pinned[0])
    wanted = [check_version(part.strip()) for part in versions.split(",")] if versions else []
    wanted = wanted or [version for version in pinned if version != series.version]
    if not wanted:
        raise Refused(f"{series.version} is the only pin; name releases with --versions")
    cache = sources or default_cache()
    fetch_missing((series.version, *wanted), cache)
    with activity() as say:
        say(f"the files of vLLM {series.version}")
        pristine = released_files(series.version, cache)
        drift = measure_drift(
            series, pristine, wanted, lambda version: released_files(version, cache), say
        )
    if write is not None:
        with naming("read", str(write)):
            text = write.read_text("utf-8")
        write_file(write, put_block(text, "drift", render_drift(series, drift), str(write)))
    if as_json:
        fates = {version: [one.document() for one in column] for version, column in drift.items()}
        print_json({"from": series.version, "versions": fates})
        return
    rows = table(f"patch of {series.version}", *drift)
    for row in drift_rows(drift):
        rows.add_row(*row)
    results().print(rows)


def _series(version: str | None, other_than: str = "") -> Series:
    root = patches_root()
    pinned = [pin for pin in pinned_versions(root) if pin != other_than]
    chosen = version or (pinned[-1] if pinned else "")
    if chosen not in pinned:
        raise Refused(f"there is no other series for vLLM {chosen or other_than}; give --from")
    return read_series(root / "vllm" / chosen)


def _work_folder(given: Path | None) -> Path:
    if given is not None:
        return given
    return Path(tempfile.mkdtemp(prefix="stagetap-rebase-")).resolve() / "vllm"


def _remove(folder: Path, given: Path | None) -> None:
    """Remove a folder of ours; one that was named is its owner's to keep."""
    if given is None:
        shutil.rmtree(folder.parent, ignore_errors=True)


def _show_rebase(carried: Sequence[Carried], target: Path, folder: Path) -> None:
    console = results()
    rows = table("patch", "in the new release", "conflicts in")
    for one in carried:
        where = [f"{path} ({regions or 'file is gone'})" for path, regions in one.conflicts.items()]
        rows.add_row(one.patch.removesuffix(".patch"), describe(one), ", ".join(where))
    console.print(rows)
    console.print(f"written to {target}", soft_wrap=True)
    if not any(one.conflicts for one in carried):
        console.print("check it with `stagetap patch table` and `stagetap patch lint`")
    else:
        console.print(
            f"resolve what is marked in {folder} (`git rebase -i pristine`, edit those commits), "
            f"then run `stagetap patch export {folder}`",
            soft_wrap=True,
        )
