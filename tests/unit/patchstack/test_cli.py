"""``stagetap patch``: exit codes, one line of JSON, one line for a refusal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagetap.cli import main, patch
from stagetap.patchstack import operations
from stagetap.patchstack.series import Series, read_series
from unit.patchstack.synthetic import COMMITS, VERSION, Commit, add_commit, make_series, snapshot


@dataclass(frozen=True)
class Ran:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def root(patches: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command's patches folder is the synthetic one."""
    (patches / "README.md").write_text("<!-- table: begin -->\n<!-- table: end -->\n")
    monkeypatch.setattr(operations, "patches_root", lambda: patches)
    monkeypatch.setattr(patch, "patches_root", lambda: patches)
    return patches


@pytest.fixture
def stagetap(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ran]:
    """Runs ``stagetap patch ...`` as its console script does."""

    def run(*arguments: str | Path) -> Ran:
        argv = ["stagetap", "patch", *(str(part) for part in arguments)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            sys.exit(main())
        captured = capsys.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


def test_apply_verify_revert(stagetap: Callable[..., Ran], vllm: Path, series: Series) -> None:
    before = snapshot(vllm)
    applied = stagetap("apply", "--vllm", vllm, "--json")
    assert applied.code == 0, applied.stderr
    assert applied.stdout.count("\n") == 1
    document = json.loads(applied.stdout)
    assert document["state"] == "applied"
    assert document["series_sha256"] == series.digest
    assert document["changed"] == series.paths
    assert "applied" in stagetap("verify", "--vllm", vllm).stdout
    assert json.loads(stagetap("status", "--vllm", vllm, "--json").stdout)["changed"] == []
    assert stagetap("revert", "--vllm", vllm).code == 0
    assert snapshot(vllm) == before


def test_a_refusal_is_one_line_and_exit_code_2(stagetap: Callable[..., Ran], vllm: Path) -> None:
    refused = stagetap("verify", "--vllm", vllm)
    assert refused.code == 2
    assert refused.stdout == ""
    assert refused.stderr.startswith("stagetap: refused: the patch series is not applied")
    assert refused.stderr.count("\n") == 1


def test_checkout_change_export(
    tmp_path: Path, root: Path, vllm: Path, stagetap: Callable[..., Ran]
) -> None:
    """The way in which patches are written, from an installed and patched vLLM."""
    stagetap("apply", "--vllm", vllm)
    work = tmp_path / "work"
    assert "on its branch series" in stagetap("checkout", work, "--vllm", vllm).stdout
    unchanged = snapshot(root / "vllm")
    assert stagetap("export", work).code == 0
    assert snapshot(root / "vllm") == unchanged
    assert stagetap("lint", "--vllm", vllm).code == 0

    add_commit(work, Commit("Another hook", {"vllm/sequence.py": ("line_7 = 7\n", "line_7 = 8\n")}))
    assert stagetap("export", work).code == 0
    assert len(read_series(root / "vllm" / VERSION).patches) == len(COMMITS) + 1
    assert "0004-another-hook" in (root / "README.md").read_text()
    assert json.loads(stagetap("apply", "--vllm", vllm, "--json").stdout)["changed"] == [
        "vllm/sequence.py"
    ]
    assert stagetap("lint", "--vllm", vllm).code == 0


FAULTS = {
    "0004-hook.patch: lacks the DEP-3 tag Description": Commit(
        "Hook", {"vllm/envs.py": "x = 1\n"}, "Origin: vendor"
    ),
    "vllm/envs.py does not compile": Commit("Hook", {"vllm/envs.py": "def (:\n"}),
    "tests/x.py is no Python module of vLLM": Commit("Hook", {"tests/x.py": "x = 1\n"}),
    "0004-hook.patch differs when regenerated": Commit(
        "Hook\n\nFrom: Me <me@example.org>", {"vllm/envs.py": "x = 1\n"}
    ),
}


@pytest.mark.parametrize("said", FAULTS)
def test_an_export_with_findings_says_them_and_writes_nothing(
    tmp_path: Path, root: Path, stagetap: Callable[..., Ran], said: str
) -> None:
    make_series(tmp_path / "r", [*COMMITS, FAULTS[said]])
    before = snapshot(root)
    exported = stagetap("export", tmp_path / "r")
    assert exported.code == 1, exported.stderr
    assert said in exported.stderr
    assert snapshot(root) == before


def test_an_export_of_a_link_writes_nothing(
    tmp_path: Path, root: Path, stagetap: Callable[..., Ran]
) -> None:
    make_series(tmp_path / "r")
    (tmp_path / "r/vllm/envs.py").unlink()
    (tmp_path / "r/vllm/envs.py").symlink_to("sequence.py")
    add_commit(tmp_path / "r", Commit("Link", {}))
    before = snapshot(root)
    exported = stagetap("export", tmp_path / "r")
    assert exported.code == 1
    assert "vllm/envs.py is deleted, renamed, binary, a link" in exported.stderr
    assert snapshot(root) == before


def test_an_export_does_not_write_beside_what_it_would_leave(
    tmp_path: Path, root: Path, stagetap: Callable[..., Ran]
) -> None:
    make_series(tmp_path / "r", COMMITS[:2])
    (root / "vllm" / VERSION / "notes.txt").write_text("stray")
    before = snapshot(root)
    assert "notes.txt is in the folder" in stagetap("export", tmp_path / "r").stderr
    assert snapshot(root) == before


def test_lint_fails_on_a_stray_file(root: Path, vllm: Path, stagetap: Callable[..., Ran]) -> None:
    (root / "vllm" / VERSION / "notes.txt").write_text("stray")
    linted = stagetap("lint", "--vllm", vllm)
    assert linted.code == 1
    assert "notes.txt is in the folder but not in series" in linted.stderr


@pytest.mark.parametrize("arguments", [[], ["work", "--upstream", "out"]])
def test_an_export_is_of_one_kind(stagetap: Callable[..., Ran], arguments: list[str]) -> None:
    exported = stagetap("export", *arguments)
    assert exported.code == 2
    assert "name the FOLDER whose commits are the series, or --upstream" in exported.stderr
