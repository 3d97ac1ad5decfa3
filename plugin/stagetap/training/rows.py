"""Training rows of a dataset: the tokens of each sample, and which of them are learnt from."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from stagetap.errors import Refused, StoreError
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.reader.sample import Sample
from stagetap.stores.file_io import check_writable, listed, naming
from stagetap.wording import one_line, shortened

if TYPE_CHECKING:
    from datasets import Dataset

LearnFrom = Literal["output", "all", "metadata"]

METADATA_KEY = "first_loss_token"
"""Of a sample whose answer was part of its prompt: the position at which it begins."""

_TOO_FEW_CURES: dict[LearnFrom, str] = {
    "output": "capture with --include-output, or write rows with --learn-from all",
    "all": "lower --min-loss-tokens",
    "metadata": "lower --min-loss-tokens, or write rows with --learn-from all",
}


@dataclass(frozen=True)
class RowsReport:
    """What was written.

    Attributes:
        rows: how many.
        tokens: of all of them.
        loss_tokens: of those, how many are learnt from.
        too_few: samples left out for having too few of these.
    """

    rows: int
    tokens: int
    loss_tokens: int
    too_few: int


def write_rows(
    dataset: HiddenStatesDataset, folder: Path, learn_from: LearnFrom, min_loss_tokens: int
) -> RowsReport:
    """Write a data folder for ``speculators train``: one row a sample, in the dataset's order.

    Its columns: ``input_ids`` and ``loss_mask``, int64 [T], and ``seq_len``. Beside it lies
    ``token_freq.pt``, from which speculators chooses a smaller vocabulary for a draft.

    Args:
        learn_from: ``output``: tokens that the target sampled; ``all``: every token; ``metadata``:
            those from the position on that the sample's metadata has as :data:`METADATA_KEY`.
        min_loss_tokens: samples with fewer tokens to learn from are left out.

    Raises:
        Refused: the folder is not empty, there would be no row, or a sample does not say where
            it is learnt from.
        StoreError: the folder cannot be written; nothing of it is left.
        StageTapError: as reading a sample.
    """
    from datasets import Dataset
    from datasets.utils.logging import disable_progress_bar

    if folder.exists() and (not folder.is_dir() or listed(str(folder))):
        raise Refused(f"{folder} is not an empty folder; choose another --out")
    check_writable(str(folder.absolute()))
    rows = list(_rows(dataset, learn_from))
    if not rows:
        raise Refused(
            "there is no sample now: none has been committed yet, or all were consumed or removed; "
            "write rows after a capture and before its consumer"
        )
    kept = [row for row in rows if row.loss_tokens >= min_loss_tokens]
    if not kept:
        raise Refused(
            f"no sample has {min_loss_tokens} tokens to learn from: {_TOO_FEW_CURES[learn_from]}"
        )
    disable_progress_bar()
    table = Dataset.from_dict(
        {
            "input_ids": [row.input_ids for row in kept],
            "loss_mask": [row.loss_mask for row in kept],
            "seq_len": [len(row.input_ids) for row in kept],
        }
    ).with_format("torch")
    try:
        _save(table, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)  # what is half there would be in the way
        raise
    return RowsReport(
        rows=len(kept),
        tokens=sum(len(row.input_ids) for row in kept),
        loss_tokens=sum(row.loss_tokens for row in kept),
        too_few=len(rows) - len(kept),
    )


def _save(table: Dataset, folder: Path) -> None:
    from speculators.train.vocab_mapping import save_token_frequency_distribution

    with naming("write the rows to", str(folder)):
        table.save_to_disk(folder)
    counts = folder / "token_freq.pt"
    try:
        with naming("write", str(counts)):
            save_token_frequency_distribution(table, counts)
    except RuntimeError as error:  # what torch makes of a disk that is full
        raise StoreError(
            f"cannot write {counts}: {shortened(one_line(error), 200)}: free some space or choose "
            "another --out",
            path=str(counts),
        ) from error


@dataclass(frozen=True)
class _Row:
    input_ids: np.ndarray  # int64 [T]
    loss_mask: np.ndarray  # int64 [T]

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


def _rows(dataset: HiddenStatesDataset, learn_from: LearnFrom) -> Iterator[_Row]:
    for sample in dataset:
        # A copy: the tokens are mapped from a file that must not stay open for each row.
        input_ids = sample.input_ids.numpy().copy()
        yield _Row(input_ids, _loss_mask(sample, learn_from))


def _loss_mask(sample: Sample, learn_from: LearnFrom) -> np.ndarray:
    mask = np.ones(sample.manifest.token_count, dtype=np.int64)
    mask[: _first_loss_token(sample, learn_from)] = 0
    return mask


def _first_loss_token(sample: Sample, learn_from: LearnFrom) -> int:
    if learn_from == "all":
        return 0
    if learn_from == "output":
        return sample.manifest.prompt_token_count
    position = sample.metadata.get(METADATA_KEY)
    if type(position) is not int or position < 0:
        raise Refused(
            f"sample {sample.sample_id!r} has no {METADATA_KEY} in its metadata, or one that is no "
            "position: capture it with one, or choose another --learn-from"
        )
    return position
