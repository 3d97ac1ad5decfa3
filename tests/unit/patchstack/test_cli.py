"""``stagetap patch``: exit codes, one line of JSON, one line for a refusal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stagetap.patchstack.series import Series, read_series
from unit.patchstack.synthetic import COMMITS, VERSION, Commit, add_commit, make_series, snapshot

PLUGIN = Path(__file__).parents[3] / "plugin" / "stagetap"


@pytest.fixture
def checkout(tmp_path: Path, patches: Path) -> Path:
    """A checkout of StageTap whose patches folder is the synthetic one."""
    root = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "_patches")
    shutil.copytree(PLUGIN, root / "plugin" / "stagetap", ignore=ignore)
    shutil.copytree(patches, root / "patches")
    (root / "patches/README.md").write_text("<!-- table: begin -->\n<!-- table: end -->\n")
    return root


def stagetap(checkout: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "from stagetap.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code, checkout / "plugin", "patch", *arguments]
    return subprocess.run([str(part) for part in command], capture_output=True, text=True)


def test_apply_verify_revert(checkout: Path, vllm: Path, series: Series) -> None:
    before = snapshot(vllm)
    applied = stagetap(checkout, "apply", "--vllm", vllm, "--json")
    assert applied.returncode == 0, applied.stderr
    assert applied.stdout.count("\n") == 1
    document = json.loads(applied.stdout)
    assert document["state"] == "applied"
    assert document["series_sha256"] == series.digest
    assert document["changed"] == series.paths
    assert "applied" in stagetap(checkout, "verify", "--vllm", vllm).stdout
    assert (
        json.loads(stagetap(checkout, "status", "--vllm", vllm, "--json").stdout)["changed"] == []
    )
    assert stagetap(checkout, "revert", "--vllm", vllm).returncode == 0
    assert snapshot(vllm) == before


def test_a_refusal_is_one_line_and_exit_code_2(checkout: Path, vllm: Path) -> None:
    refused = stagetap(checkout, "verify", "--vllm", vllm)
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("stagetap: refused: the patch series is not applied")
    assert refused.stderr.count("\n") == 1


def test_checkout_change_export(tmp_path: Path, checkout: Path, vllm: Path) -> None:
    """The way in which patches are written, from an installed and patched vLLM."""
    stagetap(checkout, "apply", "--vllm", vllm)
    work = tmp_path / "work"
    assert stagetap(checkout, "checkout", work, "--vllm", vllm).returncode == 0
    unchanged = snapshot(checkout / "patches/vllm")
    assert stagetap(checkout, "export", work).returncode == 0
    assert snapshot(checkout / "patches/vllm") == unchanged
    assert stagetap(checkout, "lint", "--vllm", vllm).returncode == 0

    add_commit(work, Commit("Another hook", {"vllm/sequence.py": ("line_7 = 7\n", "line_7 = 8\n")}))
    assert stagetap(checkout, "export", work).returncode == 0
    assert len(read_series(checkout / "patches/vllm" / VERSION).patches) == len(COMMITS) + 1
    assert "0004-another-hook" in (checkout / "patches/README.md").read_text()
    assert json.loads(stagetap(checkout, "apply", "--vllm", vllm, "--json").stdout)["changed"] == [
        "vllm/sequence.py"
    ]
    assert stagetap(checkout, "lint", "--vllm", vllm).returncode == 0


def test_an_export_with_findings_says_them_and_fails(tmp_path: Path, checkout: Path) -> None:
    make_series(tmp_path / "r", [Commit("Hook", {"vllm/envs.py": "x = 1\n"}, "Origin: vendor")])
    exported = stagetap(checkout, "export", tmp_path / "r")
    assert exported.returncode == 1
    assert "0001-hook.patch: lacks the DEP-3 tag Description" in exported.stderr


def test_lint_fails_on_a_stray_file(checkout: Path, vllm: Path) -> None:
    (checkout / "patches/vllm" / VERSION / "notes.txt").write_text("stray")
    linted = stagetap(checkout, "lint", "--vllm", vllm)
    assert linted.returncode == 1
    assert "notes.txt is in the folder but not in series" in linted.stderr
