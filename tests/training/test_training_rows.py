"""A folder of rows is held against what the trainer takes it for."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from stagetap import Refused
from stagetap.training.training_rows import COLUMNS, TrainingRows

GOOD: list[dict[str, Any]] = [
    {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "seq_len": 4},
    {"input_ids": [9, 9], "loss_mask": [0, 1], "seq_len": 2},
    {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0], "seq_len": 3},
]


def saved(folder: Path, rows: list[dict[str, Any]], form: str | None = "torch") -> Path:
    Dataset.from_list(rows).with_format(form).save_to_disk(folder)
    return folder


@pytest.mark.parametrize(
    ("total_seq_len", "loss_tokens"), [(None, [2, 1, 0]), (4, [2, 1, 0]), (3, [1, 1, 0])]
)
def test_tokens_that_a_batch_cuts_off_are_not_counted(
    tmp_path: Path, total_seq_len: int | None, loss_tokens: list[int]
) -> None:
    rows = TrainingRows(saved(tmp_path / "rows", GOOD), total_seq_len)
    assert [row.loss_tokens for row in rows] == loss_tokens
    copy = pickle.loads(pickle.dumps(rows))
    assert (len(copy), copy[1].loss_tokens) == (3, 1)
    assert [row.input_ids.tolist() for row in rows] == [row["input_ids"] for row in GOOD]
    assert rows.lengths() == [4, 2, 3]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"loss_mask": [0]}, "its loss_mask has 1 entries for 2 input_ids"),
        ({"loss_mask": [0, 1, 1]}, "its loss_mask has 3 entries for 2 input_ids"),
        ({"loss_mask": None}, "its loss_mask has 1 entries for 2 input_ids"),
        ({"loss_mask": [0, 5]}, "its loss_mask has other entries than 0 and 1"),
        ({"loss_mask": [0, -1]}, "its loss_mask has other entries than 0 and 1"),
        ({"loss_mask": [0, None]}, "its loss_mask has other entries than 0 and 1"),
        ({"seq_len": 1}, "its seq_len is 1 for 2 input_ids"),
        ({"input_ids": None}, "its input_ids are no list of token ids"),
    ],
)
def test_a_row_that_contradicts_itself(tmp_path: Path, change: dict[str, Any], found: str) -> None:
    """Its mask would lie over tokens of the rows behind it in the batch."""
    rows = TrainingRows(saved(tmp_path / "rows", [GOOD[0], GOOD[1] | change]), None)
    assert rows[0].loss_tokens == 2
    for read in (lambda: rows[1], lambda: list(rows)):
        with pytest.raises(Refused, match=rf"row 1 of .*rows: {found}: write the rows again"):
            read()


def test_a_mask_of_truth_values(tmp_path: Path) -> None:
    rows = [row | {"loss_mask": [bool(each) for each in row["loss_mask"]]} for row in GOOD]
    assert [row.loss_tokens for row in TrainingRows(saved(tmp_path / "rows", rows), None)] == [
        2,
        1,
        0,
    ]


def _cut(folder: Path) -> None:
    table = next(folder.glob("*.arrow"))
    table.write_bytes(table.read_bytes()[:-200])


def _other_json(folder: Path) -> None:
    (folder / "state.json").write_text("[]")


@pytest.mark.parametrize(
    "damage",
    [
        shutil.rmtree,
        _cut,
        _other_json,
        lambda folder: (folder / "state.json").unlink(),
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "dataset_info.json").write_text("{"),
        lambda folder: next(folder.glob("*.arrow")).unlink(),
        lambda folder: next(folder.glob("*.arrow")).write_bytes(b""),
    ],
)
def test_a_folder_that_cannot_be_read(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = saved(tmp_path / "rows", GOOD)
    damage(folder)
    with pytest.raises(Refused, match=r"rows is no folder of rows \(.+\): give one of stagetap"):
        len(TrainingRows(folder, None))


def test_a_folder_in_another_form(tmp_path: Path) -> None:
    for column in COLUMNS:
        rows = [{name: row[name] for name in COLUMNS if name != column} for row in GOOD]
        folder = saved(tmp_path / f"no-{column}", rows)
        with pytest.raises(Refused, match=rf"the rows of {folder} have no {column}: give one"):
            len(TrainingRows(folder, None))
    plain = saved(tmp_path / "plain", GOOD, form=None)
    with pytest.raises(Refused, match=r"plain was saved in another form than torch"):
        len(TrainingRows(plain, None))
    none = Dataset.from_list(GOOD).select([]).with_format("torch")
    none.save_to_disk(tmp_path / "none")
    with pytest.raises(Refused, match=r"none has no rows"):
        len(TrainingRows(tmp_path / "none", None))
    table = Dataset.from_list(GOOD).with_format("torch")
    DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "two")
    with pytest.raises(Refused, match=r"two holds several tables \(train, test\): name the"):
        len(TrainingRows(tmp_path / "two", None))
