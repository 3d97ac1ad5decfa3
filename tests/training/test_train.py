"""``stagetap train``: speculators' own command line, on a dataset of ours."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from stagetap import open_dataset
from stagetap.cli.train import train_command
from stagetap.training.rows import write_rows
from tmpfs import Tmpfs
from training.command import DSPARK, metrics, train
from training.conftest import Export


@pytest.fixture
def rows(store: Path, export: Export, tmp_path: Path) -> Path:
    for seed in range(4):
        export(f"s{seed}", 15, seed)
    write_rows(open_dataset(store), tmp_path / "rows", "output", min_loss_tokens=1)
    return tmp_path / "rows"


@pytest.mark.slow
def test_two_steps_from_a_file_store(store: Path, rows: Path, target: Path, tmp_path: Path) -> None:
    ended = train(
        *DSPARK,
        *("--verifier-name-or-path", target, "--data-path", rows, "--train-data-ratio", "0.75"),
        *("--hidden-states-backend", "stagetap", "--stagetap-store", store),
        *("--stagetap-verify", "checksums", "--max-steps", "2", "--epochs", "1"),
        *("--stagetap-min-loss-tokens", "10", "--stagetap-after-read", "remove"),
        *("--save-path", tmp_path / "draft", "--stagetap-metrics", tmp_path / "metrics"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1].startswith("0 of 4 rows of ")
    with safe_open(tmp_path / "draft/0/model.safetensors", "pt") as file:
        assert file.get_slice("fc.weight").get_shape() == [16, 2 * 16]
    state = json.loads((tmp_path / "draft/0/training_state.json").read_text())
    assert state["global_step"] == 2
    steps = [line for line in metrics(tmp_path / "metrics") if "train" in line]
    assert [step["global_step"] for step in steps] == [0, 1]
    assert all(math.isfinite(step["train"]["loss"]) for step in steps)
    assert steps[0]["train"]["error_records"] == 0
    assert len(open_dataset(store)) <= 2  # a row is a batch here, and was removed as it was read


@pytest.mark.slow
def test_it_goes_on_with_its_own_draft_alone(
    store: Path, rows: Path, target: Path, tmp_path: Path
) -> None:
    common = [
        *DSPARK,
        *("--verifier-name-or-path", target, "--data-path", rows, "--train-data-ratio", "0.75"),
        *("--hidden-states-backend", "stagetap", "--stagetap-store", store),
        *("--save-path", tmp_path / "draft"),
    ]
    for epochs in ("1", "2"):
        ended = train(*common, "--epochs", epochs, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr[-4000:]
    assert (tmp_path / "draft/1/model.safetensors").is_file()
    ended = train(*common, "--epochs", "3", "--target-layer-ids", "2", "4", cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr[-4000:]
    assert ended.stderr.splitlines()[-1] == (
        f"stagetap: refused: {tmp_path}/draft/1, which training would go on with, is of a draft "
        "with taps [4, 2], this one has [2, 4]: give the same draft, or another --save-path"
    )
    assert not (tmp_path / "draft/2").exists()


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("left_kib", [16, 40])
def test_a_checkpoint_that_does_not_fit_is_one_line_and_the_one_before_it_goes_on(
    store: Path,
    rows: Path,
    target: Path,
    mount_tmpfs: Callable[[int], Tmpfs],
    tmp_path: Path,
    left_kib: int,
) -> None:
    """The weights do not fit, or what the optimizer keeps beside them (16 and 45 KiB here)."""
    disk = mount_tmpfs(4)
    draft, filler = disk.path / "draft", disk.path / "filler"
    common = [
        *DSPARK,
        *("--verifier-name-or-path", target, "--data-path", rows, "--train-data-ratio", "0.75"),
        *("--hidden-states-backend", "stagetap", "--stagetap-store", store),
        *("--save-path", draft),
    ]
    assert train(*common, "--epochs", "1", cwd=tmp_path).returncode == 0
    filler.write_bytes(bytes(disk.free_bytes() - left_kib * 1024))
    ended = train(*common, "--epochs", "2", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr[-4000:]
    assert ended.stderr.splitlines()[-1].startswith(
        f"stagetap: error: a checkpoint cannot be written below {draft} ("
    )
    assert "Traceback" not in ended.stderr
    filler.unlink()
    ended = train(*common, "--epochs", "2", cwd=tmp_path)
    assert ended.returncode == 2, ended.stderr[-4000:]
    assert "draft/1, which training would go on with, is not whole (" in ended.stderr
    shutil.rmtree(draft / "1")
    ended = train(*common, "--epochs", "2", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert (draft / "1/model.safetensors").is_file()


def test_a_dataset_that_no_backend_would_read(tmp_path: Path) -> None:
    ended = train("--stagetap-store", "dataset", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1].startswith(
        "stagetap: refused: --stagetap-store is read by"
    )


def test_without_speculators_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    from stagetap import Refused

    monkeypatch.setitem(sys.modules, "speculators", None)
    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    with pytest.raises(Refused, match=r'not installed: pip install "stagetap\[train\]"'):
        train_command(context)
