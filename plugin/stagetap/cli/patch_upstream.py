"""``stagetap patch export --upstream``: pull requests in files."""

from __future__ import annotations

from pathlib import Path

from stagetap.cli.folders import make_folder, write_file
from stagetap.cli.output import activity, print_json, results, table
from stagetap.errors import Refused
from stagetap.patchstack.locate import patches_root, pinned_versions
from stagetap.patchstack.series import read_series
from stagetap.patchstack.sources import fetch_missing, released_files
from stagetap.patchstack.upstream import (
    Candidate,
    candidates,
    check_sign_off,
    export_candidate,
    needs,
    read_tests,
)


def export_upstream(
    out: Path, version: str | None, sign_off: str | None, cache: Path, as_json: bool
) -> None:
    """Write every upstream candidate of a series to ``out``, one file each.

    Raises Refused when the folder holds files, a candidate has no test or does not stand alone.
    """
    root = patches_root()
    pinned = pinned_versions(root)
    version = version or pinned[-1]
    if version not in pinned:
        raise Refused(f"vLLM {version} has no patch series; there are {', '.join(pinned)}")
    if sign_off is not None:
        check_sign_off(sign_off)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is not empty; name a new folder")
    series = read_series(root / "vllm" / version)
    fetch_missing([version], cache)
    found: list[Candidate] = []
    with activity() as say:
        say(f"the files of vLLM {version}")
        pristine = released_files(version, cache)
        for patch in candidates(series):
            say(patch.name)
            parts = [*needs(patch, series), patch]
            tests = {part.name: read_tests(root, part) for part in parts}
            found.append(export_candidate(patch, series, pristine, tests, sign_off))
    make_folder(out)
    for one in found:
        write_file(out / one.name, one.data)
    if as_json:
        print_json(
            {
                "vllm_version": version,
                "out": str(out),
                "signed_off": sign_off is not None,
                "candidates": [
                    {"file": one.name, "patches": one.patches, "tests": one.tests} for one in found
                ],
            }
        )
        return
    rows = table("file", "commits", "tests")
    for one in found:
        rows.add_row(one.name, str(len(one.patches)), "\n".join(one.tests))
    console = results()
    console.print(rows)
    console.print(f"for `git am` on vLLM {version}, in {out}", soft_wrap=True)
    if sign_off is None:
        console.print("not signed off, which vLLM asks for; give --sign-off 'Name <mail>'")
