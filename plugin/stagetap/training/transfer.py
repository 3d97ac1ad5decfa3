"""Rows of speculators' training data, with their hidden states out of a StageTap dataset."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hs_connectors import HiddenStatesTransfer
from speculators.train.recovery import SampleUnavailable

from stagetap.errors import AmbiguousSample, ForeignStore, Refused, SampleNotFound
from stagetap.manifest import token_digest
from stagetap.reader.dataset import HiddenStatesDataset, open_dataset
from stagetap.reader.sample import Sample
from stagetap.stores.base import Invariant, open_store_reader
from stagetap.training.token_index import TokenIndex

_POLL_SECONDS = 0.25
_BEGIN_SECONDS = 3.0  # each look at a run that has not begun is a connection of its own


@dataclass(frozen=True)
class Source:
    """Where states come from.

    Attributes:
        uri: of a StageTap dataset.
        run: one run of it, or None for all.
        stream: the stream kind that it must hold.
        verify: whether to compare checksums of what is read; None as the store does by default.
        wait_s: how long a row may wait for its sample to be committed, and the first one for the
            dataset to begin.
    """

    uri: str
    run: str | None
    stream: str
    verify: bool | None
    wait_s: float

    def open(self) -> HiddenStatesDataset:
        """Raises as ``open_dataset``."""
        return open_dataset(self.uri, run=self.run, stream=self.stream, verify=self.verify)

    def open_invariant(self) -> Invariant:
        """What the dataset holds, of whatever stream; one that has not begun is awaited.

        Raises as ``open_dataset``.
        """
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                return open_store_reader(self.uri).invariant
            except ForeignStore:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_BEGIN_SECONDS)


class StageTapTransfer(HiddenStatesTransfer):
    """Finds the sample of a row by the row's own tokens, and gives it in speculators' layout.

    Goes to DataLoader workers by pickling; each process opens dataset and rows for itself.
    """

    def __init__(
        self,
        source: Source,
        data_path: str,
        columns: tuple[int, ...],
        may_miss: bool,
        min_loss_tokens: int = 0,
        remove: bool = False,
    ) -> None:
        """
        Args:
            data_path: the folder of rows.
            columns: the draft's taps in its order, and the last tap behind them.
            may_miss: whether a row without a sample is None, and not an error.
            min_loss_tokens: rows with fewer tokens to learn from are left out.
            remove: whether a sample is removed from the store once it was read.
        """
        self._source = source
        self.may_miss = may_miss
        self._data_path = data_path
        self._columns = columns
        self._min_loss_tokens = min_loss_tokens
        self._remove = remove
        self._index = TokenIndex()
        self._dataset: HiddenStatesDataset | None = None
        self._rows: Any = None

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | SampleUnavailable | None:
        """The states of one row of the training data, or None when it has no sample.

        Returns:
            ``hidden_states`` [T, L + 1, H] in the target's dtype, the columns being the draft's
            taps and the last one; ``token_ids`` int64 [T]. SampleUnavailable, which speculators
            passes over, for a row with too few tokens to learn from: its sample is not awaited.

        Raises:
            Refused: several runs hold the sample.
            SampleNotFound: there is none, and there has to be one.
            StageTapError: there is a sample, and it is not whole.
        """
        row = self._open_rows()[file_idx]
        if self._is_short(row):
            return SampleUnavailable(reason=f"row {file_idx} has too few tokens to learn from")
        sample = self._find(token_digest(row["input_ids"]))
        if sample is None:
            if self.may_miss:
                return None
            raise SampleNotFound(
                f"row {file_idx} of {self._data_path} has no sample in {self._source.uri}"
                f"{self._waited}: capture it, or leave it out with --on-missing skip or warn"
            )
        states = torch.stack([sample.layer(column) for column in self._columns], dim=1)
        if self._remove:
            self._open().delete(sample.sample_id)
        return {"hidden_states": states, "token_ids": sample.input_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Raises Refused. Never asked for: ``get_cached`` raises for rows that would be."""
        raise Refused("StageTap's samples are captured, not made by requests of the trainer")

    def rows_without_sample(self) -> list[int]:
        """Positions of rows that have no sample now, without those that are left out anyway."""
        self._index.learn(self._open())
        return [
            position
            for position, row in enumerate(self._open_rows())
            if not self._is_short(row) and self._index.find(token_digest(row["input_ids"])) is None
        ]

    def short_rows(self) -> int:
        """How many rows are left out for having too few tokens to learn from."""
        if not self._min_loss_tokens:
            return 0
        return sum(self._is_short(row) for row in self._open_rows())

    @property
    def row_count(self) -> int:
        """Rows of the training data."""
        return len(self._open_rows())

    @property
    def _waited(self) -> str:
        return f" after {self._source.wait_s:g} s" if self._source.wait_s else ""

    def _find(self, digest: str) -> Sample | None:
        dataset = self._open()
        deadline = time.monotonic() + self._source.wait_s
        while True:
            if (sample_id := self._index.find(digest)) is not None:
                return self._read(dataset, sample_id)
            dataset.refresh()
            self._index.learn(dataset)
            if self._index.find(digest) is None:
                if time.monotonic() >= deadline:
                    return None
                time.sleep(_POLL_SECONDS)

    def _read(self, dataset: HiddenStatesDataset, sample_id: str) -> Sample | None:
        try:
            return dataset[sample_id]
        except SampleNotFound:
            return None  # deleted: as if it had never been
        except AmbiguousSample as error:
            raise Refused(f"{error}; here: --stagetap-run RUN") from error

    def _open(self) -> HiddenStatesDataset:
        if self._dataset is None:
            self._dataset = self._source.open()
        return self._dataset

    def _open_rows(self) -> Any:
        if self._rows is None:
            from datasets import load_from_disk

            self._rows = load_from_disk(self._data_path).with_format("numpy")
        return self._rows

    def _is_short(self, row: Mapping[str, Any]) -> bool:
        return int(row["loss_mask"].sum()) < self._min_loss_tokens

    def __getstate__(self) -> dict[str, Any]:
        # A connection is of one process; the index is worth sending.
        return self.__dict__ | {"_dataset": None, "_rows": None}
