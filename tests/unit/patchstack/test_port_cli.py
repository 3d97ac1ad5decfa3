"""``stagetap patch rebase`` and ``drift`` on synthetic releases, without a network."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stagetap.cli import main, patch, patch_port
from stagetap.errors import Refused
from stagetap.patchstack import operations
from stagetap.patchstack.gitrun import GitError, git
from stagetap.patchstack.locate import pinned_versions
from stagetap.patchstack.series import read_series
from unit.patchstack.synthetic import PRISTINE, make_package

Run = Callable[..., tuple[int, str, str]]


def _release(version: str, model: bytes = b"") -> dict[str, bytes]:
    said = {"vllm/_version.py": f"__version__ = version = {version!r}\n".encode()}
    return PRISTINE | said | ({"vllm/config/model.py": model} if model else {})


def _release_0_34() -> bytes:
    model = PRISTINE["vllm/config/model.py"]
    return model.replace(b"line_3 = 3\nline_4 = 4\n", b"line_3 = 5\n")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Three releases: as before, with moved lines, with changed lines where a hook goes."""
    model = PRISTINE["vllm/config/model.py"]
    releases = {
        "0.32.0": _release("0.32.0"),
        "0.33.0": _release("0.33.0", b"# more\n" + model),
        "0.34.0": _release("0.34.0", _release_0_34()),
    }
    for version, files in releases.items():
        make_package(tmp_path / "sources" / version, files)
    return tmp_path / "sources"


@pytest.fixture
def stagetap(
    patches: Path,
    sources: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    (patches / "README.md").write_text("<!-- table: begin -->\n<!-- table: end -->\n")
    for module in (patch, patch_port):
        monkeypatch.setattr(module, "patches_root", lambda: patches)
    # The vLLM that runs the tests is 0.32.0 as well; these releases are the ones that count.
    monkeypatch.setattr("stagetap.patchstack.sources._is_at_hand", lambda *_: False)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        argv = ["stagetap", "patch", *map(str, arguments), "--sources", str(sources)]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            sys.exit(main())
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_a_rebase_without_conflicts_is_a_finished_series(stagetap: Run, patches: Path) -> None:
    code, out, error = stagetap("rebase", "--to", "0.33.0", "--json")
    assert code == 0, error
    document = json.loads(out)
    assert out.count("\n") == 1
    assert [one["fate"] for one in document["patches"]] == ["offset", "applies", "offset"]
    assert (document["conflicts"], document["work"]) == (0, None)
    assert pinned_versions(patches) == ["0.32.0", "0.33.0"]
    assert read_series(patches / "vllm/0.33.0").digest == document["series_sha256"]
    code, _, error = stagetap("rebase", "--to", "0.33.0")
    assert code == 2
    assert "holds a series already" in error


def test_a_conflict_is_marked_and_listed(stagetap: Run, patches: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    code, out, _ = stagetap("rebase", "--to", "0.34.0", "--work", work)
    assert code == 1
    assert "0001-hook-the-model-config" in out
    assert "vllm/config/model.py (1)" in out
    assert f"stagetap patch export {work}" in out.replace("\n", "")
    assert read_series(patches / "vllm/0.34.0").patches[0].conflicted
    code, _, error = stagetap("lint")
    assert code == 1
    assert "0.34.0: 0001-hook-the-model-config.patch: carries conflict markers" in error


def test_a_conflict_is_resolved_by_commits_and_an_export(
    stagetap: Run, patches: Path, tmp_path: Path
) -> None:
    """As docs/patches.md says it, with an editor that marks the first commit for editing."""
    work = tmp_path / "work"
    stagetap("rebase", "--to", "0.34.0", "--work", work)
    model = work / "vllm/config/model.py"
    released = _release_0_34()
    with contextlib.suppress(GitError):
        git("-c", "sequence.editor=sed -i '1s/pick/edit/'", "rebase", "-i", "pristine", cwd=work)
    model.write_bytes(released.replace(b"line_3 = 5\n", b"line_3 = 5\nhook = 1\n"))
    git("commit", "--all", "--quiet", "--amend", "--no-edit", cwd=work)
    with contextlib.suppress(GitError):
        git("rebase", "--continue", cwd=work)
    # The third patch changes the very lines that were marked, and stops once more.
    model.write_bytes(released.replace(b"line_3 = 5\n", b"line_3 = 5\nhook = 2\n# and once more\n"))
    git("add", "--all", cwd=work)
    git("-c", "core.editor=true", "rebase", "--continue", cwd=work)
    code, _, error = stagetap("export", work)
    assert code == 0, error
    series = read_series(patches / "vllm/0.34.0")
    assert not any(patch.conflicted for patch in series.patches)
    assert [patch.name[:4] for patch in series.patches] == ["0001", "0002", "0003"]
    assert stagetap("lint")[0] == 0


def test_what_is_no_release_or_has_no_series_is_refused(stagetap: Run) -> None:
    assert "is no version" in stagetap("rebase", "--to", "next")[2]
    assert "no other series" in stagetap("rebase", "--to", "0.33.0", "--from", "0.31.0")[2]
    assert "name releases with --versions" in stagetap("drift")[2]


def test_drift_says_and_writes_its_table(stagetap: Run, tmp_path: Path) -> None:
    page = tmp_path / "patches.md"
    page.write_text("<!-- drift: begin -->\n<!-- drift: end -->\n")
    versions = ("drift", "--versions", "0.33.0, 0.34.0")
    code, out, error = stagetap(*versions, "--json", "--write", page)
    assert code == 0, error
    fates = {
        v: [one["fate"] for one in column] for v, column in json.loads(out)["versions"].items()
    }
    assert fates["0.33.0"] == ["offset", "applies", "offset"]
    assert fates["0.34.0"][0] == "conflicts"
    assert "| 0002-add-a-module-of-hooks | applies, +1 -0 left |" in page.read_text()
    assert "offset 1, +2 -1 left" in stagetap(*versions)[1]


def test_a_checkout_of_a_named_pin(stagetap: Run, tmp_path: Path) -> None:
    stagetap("rebase", "--to", "0.33.0")
    code, out, error = stagetap("checkout", tmp_path / "work", "--version", "0.33.0")
    assert code == 0, error
    assert "vLLM 0.33.0 with 3 patches" in out
    assert (tmp_path / "work/vllm/config/model.py").read_bytes().startswith(b"# more\n")
    assert "there are 0.32.0, 0.33.0" in stagetap("checkout", "x", "--version", "0.1.0")[2]


def test_lint_regenerates_every_release_that_is_here(
    stagetap: Run, sources: Path, tmp_path: Path
) -> None:
    stagetap("rebase", "--to", "0.33.0")
    stagetap("checkout", tmp_path / "work", "--version", "0.33.0")
    (sources / "0.32.0").rename(tmp_path / "aside")
    code, _, error = stagetap("lint")
    assert "0.32.0: not regenerated" in error
    assert "run `just patch-table`" in error, "the rebase has left the table to the export"
    assert code == 1
    (sources / "0.33.0").rename(tmp_path / "aside-too")
    assert "no pinned vLLM is here" in stagetap("lint")[2]


def test_the_series_follows_from_the_version(stagetap: Run, patches: Path, sources: Path) -> None:
    stagetap("rebase", "--to", "0.33.0")
    for version in ("0.32.0", "0.33.0"):
        vllm = sources / version / "vllm"
        before = (vllm / "config/model.py").read_bytes()
        applied = operations.apply(vllm, patches)
        assert (applied.state, applied.series.version) == ("applied", version)
        assert operations.verify(vllm, patches).series.digest == applied.series.digest
        operations.revert(vllm, patches)
        assert (vllm / "config/model.py").read_bytes() == before
    other = make_package(sources / "0.31.0", _release("0.31.0"))
    with pytest.raises(Refused, match=r"install vllm==0\.32\.0 or 0\.33\.0"):
        operations.apply(other, patches)
