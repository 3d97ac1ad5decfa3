"""``stagetap patch``: the patch series on the installed vLLM, and the tools to rework it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from stagetap import patchstack
from stagetap.errors import Refused
from stagetap.patchstack.lint import lint_folder, lint_readme, lint_round_trip
from stagetap.patchstack.locate import patches_root, pinned_versions
from stagetap.patchstack.operations import Status, pristine_package
from stagetap.patchstack.series import Series, read_series, write_series
from stagetap.patchstack.table import put_tables
from stagetap.patchstack.workshop import (
    build_repository,
    export_repository,
    python_sources,
    unlike_release,
)

app = typer.Typer(no_args_is_help=True, help="Apply, check and rework the patches to vLLM.")

VllmOption = Annotated[
    Path | None,
    typer.Option("--vllm", help="A vLLM package directory; default: the one Python imports."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
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
def checkout_command(folder: FolderArgument, vllm: VllmOption = None) -> None:
    """Make FOLDER a git repository of the released vLLM with a commit for each patch."""
    package, series, touched = pristine_package(vllm)
    files = {**python_sources(package), **touched}
    if differing := unlike_release(package, files):
        raise Refused(
            f"{differing[0]} is neither as released nor patched by StageTap; name a vLLM that is "
            "with --vllm PATH"
        )
    build_repository(folder, files, series)
    typer.echo(f"{folder}: vLLM {series.version} with {len(series.patches)} patches as commits")


@app.command("export")
def export_command(folder: FolderArgument) -> None:
    """Write the series, its lock and the table of patches/README.md from FOLDER's commits."""
    root = patches_root()
    series = export_repository(folder)
    write_series(series, root / "vllm" / series.version)
    _write_tables(root)
    typer.echo(f"{len(series.patches)} patches, digest {series.digest}")
    _report([finding for folder in _series_folders(root) for finding in lint_folder(folder)])


@app.command("table")
def table_command() -> None:
    """Write the table of patches/README.md anew."""
    _write_tables(patches_root())


@app.command("lint")
def lint_command(vllm: VllmOption = None) -> None:
    """Check that folder == series == lock, and that the patches regenerate without a diff."""
    root = patches_root()
    findings = [finding for folder in _series_folders(root) for finding in lint_folder(folder)]
    if not findings:
        _, series, pristine = pristine_package(vllm)
        findings += lint_readme((root / "README.md").read_text("utf-8"), _all_series(root))
        findings += lint_round_trip(series, pristine)
    _report(findings)


def _series_folders(root: Path) -> list[Path]:
    return [root / "vllm" / version for version in pinned_versions(root)]


def _all_series(root: Path) -> list[Series]:
    return [read_series(folder) for folder in _series_folders(root)]


def _write_tables(root: Path) -> None:
    readme = root / "README.md"
    readme.write_text(put_tables(readme.read_text("utf-8"), _all_series(root)), "utf-8")


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
