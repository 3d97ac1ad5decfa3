"""Rows of training data: which tokens, and which of them are learnt from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from datasets import load_from_disk

from stagetap import Refused, open_dataset
from stagetap.errors import StoreError
from stagetap.training.rows import write_rows
from store_samples import Engine, token_ids
from tmpfs import Tmpfs
from training.conftest import PROMPT_TOKENS, Export


def test_a_row_is_a_sample_and_output_is_learnt_from(
    store: Path, export: Export, tmp_path: Path
) -> None:
    lengths = [9, 7, 8]
    for seed, tokens in enumerate(lengths):
        export(f"s{seed}", tokens, seed)
    report = write_rows(open_dataset(store), tmp_path / "rows", "output", min_loss_tokens=3)
    assert (report.rows, report.too_few) == (2, 1)
    assert (report.tokens, report.loss_tokens) == (17, 17 - 2 * PROMPT_TOKENS)
    rows = load_from_disk(tmp_path / "rows")
    assert [row["seq_len"].item() for row in rows] == [9, 8]
    for row, seed in zip(rows, (0, 2), strict=True):
        tokens = token_ids(lengths[seed], seed)
        assert row["input_ids"].dtype == row["loss_mask"].dtype == torch.int64
        assert row["input_ids"].tolist() == tokens.tolist()
        assert row["loss_mask"].tolist() == [0] * 5 + [1] * (lengths[seed] - 5)
    counts = torch.load(tmp_path / "rows/token_freq.pt", weights_only=True)
    assert sum(counts.values()) == report.loss_tokens


def test_every_token_may_be_learnt_from(store: Path, export: Export, tmp_path: Path) -> None:
    export("prompt only", PROMPT_TOKENS, 0)
    dataset = open_dataset(store)
    with pytest.raises(Refused, match=r"no sample has 1 tokens .* --include-output"):
        write_rows(dataset, tmp_path / "rows", "output", min_loss_tokens=1)
    assert not (tmp_path / "rows").exists()
    with pytest.raises(Refused, match=r"no sample has 6 tokens .*: lower --min-loss-tokens$"):
        write_rows(dataset, tmp_path / "rows", "all", min_loss_tokens=6)
    report = write_rows(dataset, tmp_path / "rows", "all", min_loss_tokens=1)
    assert report.loss_tokens == report.tokens == PROMPT_TOKENS


def test_what_was_consumed_is_not_too_short(store: Path, export: Export, tmp_path: Path) -> None:
    export("s", 7, 0)
    open_dataset(store).delete("s")
    with pytest.raises(Refused, match=r"there is no sample now: .* all were consumed"):
        write_rows(open_dataset(store), tmp_path / "rows", "all", min_loss_tokens=1)


@pytest.mark.parametrize(
    ("metadata", "learnt"), [({"first_loss_token": 3}, [0, 0, 0, 1, 1, 1, 1]), ({}, None)]
)
def test_a_sample_says_where_its_answer_begins(
    store: Path, tmp_path: Path, metadata: dict[str, int], learnt: list[int] | None
) -> None:
    engine = Engine(store)
    made = engine.publish(engine.ref("s"), 7)
    engine.committer.commit(msgspec.structs.replace(made, metadata=metadata))
    engine.close()
    if learnt is None:
        with pytest.raises(Refused, match=r"sample 's' has no first_loss_token"):
            write_rows(open_dataset(store), tmp_path / "rows", "metadata", min_loss_tokens=1)
        return
    write_rows(open_dataset(store), tmp_path / "rows", "metadata", min_loss_tokens=1)
    assert load_from_disk(tmp_path / "rows")[0]["loss_mask"].tolist() == learnt


def test_a_folder_that_is_in_use_is_left_alone(store: Path, export: Export, tmp_path: Path) -> None:
    export("s", 7, 0)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine.txt").write_text("mine")
    with pytest.raises(Refused, match=r"notes is not an empty folder"):
        write_rows(open_dataset(store), tmp_path / "notes", "all", min_loss_tokens=1)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["mine.txt"]


def test_rows_that_cannot_be_written(
    store: Path, export: Export, tmp_path: Path, mount_tmpfs: Callable[[int], Tmpfs]
) -> None:
    for seed in range(3):
        export(f"s{seed}", 9, seed)
    dataset = open_dataset(store)

    def refused(folder: Path, said: str) -> None:
        with pytest.raises(StoreError, match=rf"cannot write .*{folder}.*{said}"):
            write_rows(dataset, folder, "all", min_loss_tokens=1)
        assert not folder.exists()

    file = tmp_path / "file"
    file.touch()
    refused(file / "rows", "ENOTDIR")
    tmpfs = mount_tmpfs(1)
    filler = tmpfs.path / "filler"
    # Too little for the table, and for the counts behind it.
    for left_bytes in (0, 4096, 8192, 12288):
        filler.write_bytes(b"")
        filler.write_bytes(bytes(tmpfs.free_bytes() - left_bytes))
        refused(tmpfs.path / "rows", "free some space")
    filler.unlink()
    tmpfs.make_read_only()
    refused(tmpfs.path / "rows", "EROFS")
