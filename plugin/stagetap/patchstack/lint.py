"""The rules of the series: folder == series == lock, small, hooks only, and regenerating.

Rules are pure functions that return findings, one line each; ``lint_folder`` and
``lint_round_trip`` read the disk for them.
"""

from __future__ import annotations

import datetime
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path

from stagetap.errors import StageTapError
from stagetap.patchstack.gitrun import Contents
from stagetap.patchstack.patchfile import Patch, PatchFormatError, file_name
from stagetap.patchstack.series import LOCK_FILE, SERIES_FILE, Series, parse_series, read_series
from stagetap.patchstack.table import LINE_BUDGET, put_tables
from stagetap.patchstack.tree import compile_error, patched_contents
from stagetap.patchstack.workshop import build_repository, export_repository

# The Python files in which the CPU wheel and the GPU wheel of one release differ.
BUILD_SPECIFIC = frozenset(
    {"vllm/_version.py", "vllm/platforms/__init__.py", "vllm/utils/cpu_triton_utils.py"}
)

_FROM_ZERO = b"From " + b"0" * 40 + b" Mon Sep 17 00:00:00 2001\n"
_FULL_INDEX = re.compile(rb"^index (?!([0-9a-f]{40})\.\.([0-9a-f]{40})(?: \d+)?$)", re.MULTILINE)
_URL = re.compile(r"^https://\S+$")
_PLAIN_PATH = re.compile(r"^vllm(?:/[A-Za-z0-9_]+)+\.py$")


def lint_series(series: Series) -> list[str]:
    """Every rule that needs the patches and the lock alone."""
    findings = [finding for patch in series.patches for finding in lint_patch(patch)]
    return findings + _lint_names(series) + _lint_lock(series) + _lint_budget(series)


def lint_patch(patch: Patch) -> list[str]:
    """The rules that each patch has to keep by itself."""
    try:
        found = [*_lint_form(patch), *_lint_tags(patch.tags), *_lint_changes(patch)]
    except PatchFormatError as error:
        return [str(error)]
    return [f"{patch.name}: {finding}" for finding in found]


def lint_listing(present: Iterable[str], named: Iterable[str]) -> list[str]:
    """The folder holds what ``series`` names, and nothing else."""
    expected = {SERIES_FILE, LOCK_FILE, *named}
    present = set(present)
    stray = [f"{name} is in the folder but not in {SERIES_FILE}" for name in present - expected]
    return sorted(stray + [f"{name} is missing from the folder" for name in expected - present])


def lint_target(folder: Path, series: Series) -> list[str]:
    """What ``series`` would not replace when it is written to ``folder``, which may not exist."""
    present = {path.name for path in folder.glob("*") if path.suffix != ".patch"}
    names = [patch.name for patch in series.patches]
    return lint_listing({SERIES_FILE, LOCK_FILE, *names, *present}, names)


def lint_folder(folder: Path) -> list[str]:
    """All findings about one series folder, but for those that need vLLM's files."""
    try:
        named = parse_series((folder / SERIES_FILE).read_bytes())
        listing = lint_listing((path.name for path in folder.iterdir()), named)
        findings = listing or lint_series(read_series(folder))
    except (OSError, StageTapError) as error:
        findings = [str(error)]
    return [f"{folder.name}: {finding}" for finding in findings]


def lint_readme(readme: str, all_series: Iterable[Series]) -> list[str]:
    """The numbers in ``patches/README.md`` are those of the patches."""
    try:
        fresh = put_tables(readme, all_series)
    except StageTapError as error:
        return [str(error)]
    stale = "patches/README.md does not say the numbers of the patches; run `just patch-table`"
    return [] if fresh == readme else [stale]


def lint_round_trip(series: Series, pristine: Contents) -> list[str]:
    """The series applies to the pristine files, gives files that compile, and regenerates.

    The last means each byte of each patch, through git's mail format and commits.
    """
    try:
        after = patched_contents(pristine, series)
        if broken := [error for item in after.items() if (error := compile_error(*item))]:
            return [f"{series.version}: {error}" for error in broken]
        with tempfile.TemporaryDirectory(prefix="stagetap-lint-") as temporary:
            folder = Path(temporary).resolve() / "series"
            build_repository(folder, pristine, series)
            again = export_repository(folder)
    except StageTapError as error:
        return [f"{series.version}: {error}"]
    old = {patch.name: patch.data for patch in series.patches}
    new = {patch.name: patch.data for patch in again.patches}
    differing = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if not differing and series.lock.encode() != again.lock.encode():
        differing = [LOCK_FILE]
    return [
        f"{series.version}: {name} differs when regenerated; run `just patch-export`, or, if that "
        "says it, write the commit's message more plainly"
        for name in differing
    ]


def _lint_form(patch: Patch) -> list[str]:
    findings = []
    if not patch.data.startswith(_FROM_ZERO):
        findings.append("the From line does not carry the zero commit id")
    if _FULL_INDEX.search(patch.data):
        findings.append("blob ids are abbreviated")
    if b"\n-- \n" in patch.data:
        findings.append("carries a signature with git's version")
    if b"\r" in patch.data:
        findings.append("carries carriage returns")
    if patch.conflicted:
        findings.append("carries conflict markers; resolve them and run `just patch-export`")
    if len(patch.subject) > 72:
        findings.append("the subject is longer than 72 characters")
    return findings


def _lint_tags(tags: dict[str, str]) -> list[str]:
    required = ("Description", "Origin", "Forwarded", "Applied-Upstream", "Last-Update")
    findings = [f"lacks the DEP-3 tag {tag}" for tag in required if not tags.get(tag)]
    forwarded = tags.get("Forwarded", "")
    if forwarded and forwarded not in ("no", "not-needed") and not _URL.match(forwarded):
        findings.append(f"Forwarded is {forwarded!r}: say no, not-needed or an https address")
    if updated := tags.get("Last-Update", ""):
        try:
            datetime.date.fromisoformat(updated)
        except ValueError:
            findings.append(f"Last-Update is {updated!r}, not a date like 2026-01-31")
    return findings


def _lint_changes(patch: Patch) -> list[str]:
    findings = []
    for change in patch.changes:
        if change.kind == "other":
            findings.append(f"{change.path} is deleted, renamed, binary, a link or changes mode")
        if change.path in BUILD_SPECIFIC:
            findings.append(f"{change.path} differs between the builds of one release")
        elif not _PLAIN_PATH.match(change.path):
            findings.append(f"{change.path} is no Python module of vLLM")
    return findings


def _lint_names(series: Series) -> list[str]:
    findings = []
    for number, patch in enumerate(series.patches, start=1):
        try:
            expected = file_name(number, patch.subject)
        except PatchFormatError:
            continue  # said by lint_patch
        if patch.name != expected:
            findings.append(f"{patch.name} should be called {expected}")
    return findings


def _lint_lock(series: Series) -> list[str]:
    return [
        f"{path} is the same before and after the series"
        for path, pin in sorted(series.lock.files.items())
        if pin.before == pin.after
    ]


def _lint_budget(series: Series) -> list[str]:
    try:
        added = sum(patch.added for patch in series.patches)
    except PatchFormatError:
        return []  # said by lint_patch
    return [f"the series adds {added} lines, {LINE_BUDGET} at most"] if added > LINE_BUDGET else []
