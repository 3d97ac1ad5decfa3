"""``stagetap patch``: the patch series on the installed vLLM, and the tools to rework it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagetap import patchstack
from stagetap.cli.arguments import JsonOption
from stagetap.cli.folders import write_file
from stagetap.cli.output import print_json
from stagetap.cli.patch_port import SourcesOption, drift_command, rebase_command
from stagetap.cli.patch_upstream import export_upstream
from stagetap.errors import Refused
from stagetap.patchstack.checkout import BRANCH
from stagetap.patchstack.lint import (
    lint_folder,
    lint_readme,
    lint_round_trip,
    lint_series,
    lint_target,
)
from stagetap.patchstack.locate import find_vllm, in_order, patches_root, pinned_versions
from stagetap.patchstack.operations import Status
from stagetap.patchstack.releases import default_cache
from stagetap.patchstack.series import Series, read_series, write_series
from stagetap.patchstack.sources import files_at_hand, released_files
from stagetap.patchstack.table import put_tables
from stagetap.patchstack.workshop import build_repository, export_repository, released_blobs
from stagetap.stores.file_io import naming

app = typer.Typer(no_args_is_help=True, help="Apply, check and rework the patches to vLLM.")
app.command("rebase")(rebase_command)
app.command("drift")(drift_command)

VllmOption = Annotated[
    Path | None,
    typer.Option("--vllm", help="A vLLM package directory; default: the one Python imports."),
]
VersionOption = Annotated[
    str | None, typer.Option("--version", help="A pinned release; default: see above.")
]
FolderArgument = Annotated[Path, typer.Argument(help="The git repository to work in.")]


@app.command("status")
def status_command(vllm: VllmOption = None, as_json: JsonOption = False) -> None:
    """Say what state each touched file is in. Changes nothing."""
    found = patchstack.status(vllm)
    if not as_json:
        _show_files(found)
    _show(found, as_json)


@app.command("apply")
def apply_command(vllm: VllmOption = None, as_json: JsonOption = False) -> None:
    """Patch vLLM: all files or none; nothing when it is patched already."""
    _show(patchstack.apply(vllm), as_json)


@app.command("revert")
def revert_command(vllm: VllmOption = None, as_json: JsonOption = False) -> None:
    """Give vLLM its released bytes back."""
    _show(patchstack.revert(vllm), as_json)


@app.command("verify")
def verify_command(vllm: VllmOption = None, as_json: JsonOption = False) -> None:
    """Succeed only when vLLM carries exactly this series."""
    _show(patchstack.verify(vllm), as_json)


@app.command("checkout")
def checkout_command(
    folder: FolderArgument,
    version: VersionOption = None,
    vllm: VllmOption = None,
    sources: SourcesOption = None,
) -> None:
    """Make FOLDER a git repository of the released vLLM with a commit for each patch.

    The release is the one of the vLLM at hand, or --version, which may be downloaded.
    """
    if version is None:
        version = find_vllm(vllm).version
    series = _pinned(version)
    files = released_files(version, sources or default_cache(), vllm)
    build_repository(folder, files, series)
    typer.echo(
        f"{folder}: vLLM {series.version} with {len(series.patches)} patches as commits on its "
        f"branch {BRANCH}"
    )


@app.command("export")
def export_command(
    folder: Annotated[
        Path | None, typer.Argument(help="The repository of `checkout` or `rebase --work`.")
    ] = None,
    upstream: Annotated[
        Path | None,
        typer.Option("--upstream", help="A new folder for the patches to offer to vLLM."),
    ] = None,
    version: VersionOption = None,
    sign_off: Annotated[
        str | None,
        typer.Option("--sign-off", help="'Name <mail>': author and signature of --upstream."),
    ] = None,
    sources: SourcesOption = None,
    as_json: JsonOption = False,
) -> None:
    """FOLDER's commits as the series, or with --upstream each candidate as a pull request.

    The first writes the patches, their lock and the table of patches/README.md, or nothing when
    it finds something wrong, which it says with exit code 1 or 2. The second writes
    one stand-alone git patch with its test for each patch that upstream was not offered yet, made
    for the newest pin or for --version.
    """
    if (folder is None) == (upstream is None):
        raise Refused("name the FOLDER whose commits are the series, or --upstream and a folder")
    if upstream is not None:
        export_upstream(upstream, version, sign_off, sources or default_cache(), as_json)
    elif folder is not None:
        _export_series(folder, as_json)


def _export_series(folder: Path, as_json: bool) -> None:
    root = patches_root()
    series = export_repository(folder)
    target = root / "vllm" / series.version
    findings = lint_target(target, series) + lint_series(series)
    findings = findings or lint_round_trip(series, released_blobs(folder, series))
    tables = _tables(root, series)
    if not findings:
        with naming("write the series to", str(target)):
            write_series(series, target)
        write_file(root / "README.md", tables)
    if as_json:
        print_json(
            {
                "vllm_version": series.version,
                "series_sha256": series.digest,
                "patches": [patch.name for patch in series.patches],
                "findings": findings,
            }
        )
    elif not findings:
        typer.echo(f"{len(series.patches)} patches, digest {series.digest}")
    _report(findings)


@app.command("table")
def table_command() -> None:
    """Write the table of patches/README.md anew."""
    root = patches_root()
    write_file(root / "README.md", _tables(root))


@app.command("lint")
def lint_command(
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Download releases that are not at hand.")
    ] = False,
    vllm: VllmOption = None,
    sources: SourcesOption = None,
) -> None:
    """Check that folder == series == lock, and that the patches regenerate without a diff.

    The last needs the files of the release: those of the vLLM at hand and of releases that were
    fetched before, or of all with --fetch. A release that was not checked is said.
    """
    root = patches_root()
    findings = [finding for folder in _series_folders(root) for finding in lint_folder(folder)]
    if not findings:
        findings += lint_readme((root / "README.md").read_text("utf-8"), _all_series(root))
        of = released_files if fetch else files_at_hand
        regenerated = 0
        for series in _all_series(root):
            files = of(series.version, sources or default_cache(), vllm)
            if files is None:
                typer.echo(
                    f"{series.version}: not regenerated, its files are not here; give --fetch",
                    err=True,
                )
                continue
            regenerated += 1
            findings += lint_round_trip(series, {path: files.get(path) for path in series.paths})
        if not regenerated:
            findings.append("no pinned vLLM is here to regenerate a series from; give --fetch")
    _report(findings)


def _pinned(version: str) -> Series:
    root = patches_root()
    if version not in (versions := pinned_versions(root)):
        raise Refused(f"vLLM {version} has no patch series; there are {', '.join(versions)}")
    return read_series(root / "vllm" / version)


def _series_folders(root: Path) -> list[Path]:
    return [root / "vllm" / version for version in pinned_versions(root)]


def _all_series(root: Path) -> list[Series]:
    return [read_series(folder) for folder in _series_folders(root)]


def _tables(root: Path, fresh: Series | None = None) -> str:
    """patches/README.md with the numbers of every series; of ``fresh`` in place of its folder."""
    new = {} if fresh is None else {fresh.version: fresh}
    versions = in_order({*pinned_versions(root), *new})
    every = [new.get(version) or read_series(root / "vllm" / version) for version in versions]
    return put_tables((root / "README.md").read_text("utf-8"), every)


def _report(findings: list[str]) -> None:
    for finding in findings:
        typer.echo(finding, err=True)
    if findings:
        raise typer.Exit(1)


def _show(found: Status, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found.document()))
        return
    typer.echo(
        f"vLLM {found.package.version}: {found.state}, {len(found.series.patches)} patches, "
        f"{len(found.changed)} files changed now"
    )


def _show_files(found: Status) -> None:
    table = Table("file", "state")
    for path, state in found.files.items():
        table.add_row(path, state)
    Console().print(table)
