"""Rows of speculators' training data, with their hidden states out of a StageTap dataset."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from hs_connectors import HiddenStatesTransfer
from speculators.train.recovery import SampleUnavailable

from stagetap.errors import AmbiguousSample, ForeignStore, NonFinite, Refused, SampleNotFound
from stagetap.manifest import token_digest
from stagetap.publish.finite import first_nonfinite
from stagetap.reader.dataset import HiddenStatesDataset, open_dataset
from stagetap.reader.sample import Sample
from stagetap.stores.base import Invariant, open_store_reader
from stagetap.training.tally import Tally
from stagetap.training.token_index import TokenIndex
from stagetap.training.training_rows import TrainingRow, TrainingRows

_POLL_SECONDS = 0.25
_LOOKS_A_ROUND = 64  # at the tally of as many misses as there are rows
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
        total_seq_len: int | None = None,
        min_loss_tokens: int = 0,
        remove: bool = False,
        tally: Tally | None = None,
    ) -> None:
        """
        Args:
            data_path: the folder of rows.
            columns: the draft's taps in its order, and the last tap behind them.
            may_miss: whether a row without a sample is None, and not an error.
            total_seq_len: tokens of a batch, to which a longer row is cut; None for no limit.
            min_loss_tokens: rows with fewer tokens to learn from are left out.
            remove: whether a sample is removed from the store once it was read.
            tally: counts rows that were asked for, where one without a sample is no error.
        """
        self._source = source
        self.may_miss = may_miss
        self._data_path = data_path
        self._columns = columns
        self._min_loss_tokens = min_loss_tokens
        self._remove = remove
        self._tally = tally
        self._missed = 0  # in this process
        self._index = TokenIndex()
        self._dataset: HiddenStatesDataset | None = None
        self._rows = TrainingRows(data_path, total_seq_len)

    def get_cached(self, file_idx: int) -> dict[str, torch.Tensor] | SampleUnavailable | None:
        """The states of one row of the training data, or None when it has no sample.

        Returns:
            ``hidden_states`` [T, L + 1, H] in the target's dtype, the columns being the draft's
            taps and the last one; ``token_ids`` int64 [T]. SampleUnavailable, which speculators
            passes over, for a row with too few tokens to learn from: its sample is not awaited.

        Raises:
            Refused: several runs hold the sample, or the row contradicts itself.
            SampleNotFound: there is none, and there has to be one; or there was none for as many
                rows in a row as there are, so that nothing is trained any more.
            NonFinite: a state that the draft would read is NaN or Inf.
            StageTapError: there is a sample, and it is not whole.
        """
        row = self._rows[file_idx]
        if self._is_short(row):
            return SampleUnavailable(reason=f"row {file_idx} has too few tokens to learn from")
        sample = self._find(token_digest(row.input_ids))
        if self._tally is not None:
            self._tally.note(sample is not None)
        if sample is None:
            if self.may_miss:
                self._check_some_are_found()
                return None
            raise SampleNotFound(
                f"row {file_idx} of {self._data_path} has no sample in {self._source.uri}"
                f"{self._waited}: capture it, or leave it out with --on-missing skip or warn"
            )
        states = torch.stack([sample.layer(column) for column in self._columns], dim=1)
        self._check_finite(sample, states)
        if self._remove:
            self._open().delete(sample.sample_id)
        return {"hidden_states": states, "token_ids": sample.input_ids}

    def get_generated(self, hs_transfer_params: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Raises Refused. Never asked for: ``get_cached`` raises for rows that would be."""
        raise Refused("StageTap's samples are captured, not made by requests of the trainer")

    def rows_without_sample(self) -> list[int]:
        """Positions of rows that have no sample now, without those that are left out anyway.

        Raises Refused for a row whose sample is in several runs.
        """
        dataset = self._open()
        self._index.learn(dataset)
        self._check_one_run(dataset)
        return [position for position, digest in self._rows_read() if not self._index.find(digest)]

    def repeated_rows(self) -> tuple[int, int] | None:
        """The first two rows of the same tokens, without those that are left out anyway."""
        first: dict[str, int] = {}
        for position, digest in self._rows_read():
            if (earlier := first.setdefault(digest, position)) != position:
                return earlier, position
        return None

    def loss_tokens(self) -> list[int]:
        """How many tokens of each row are learnt from.

        Raises Refused: there are no rows, or one contradicts itself.
        """
        return [row.loss_tokens for row in self._rows]

    @property
    def row_count(self) -> int:
        """Rows of the training data."""
        return len(self._rows)

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

    def _rows_read(self) -> Iterator[tuple[int, str]]:
        """Position and token digest of every row that is not left out."""
        for position, row in enumerate(self._rows):
            if not self._is_short(row):
                yield position, token_digest(row.input_ids)

    def _is_short(self, row: TrainingRow) -> bool:
        return row.loss_tokens < self._min_loss_tokens

    def _check_one_run(self, dataset: HiddenStatesDataset) -> None:
        runs: dict[str, set[str]] = {}
        for entry in dataset.entries:
            runs.setdefault(entry.sample_id, set()).add(entry.run_id)
        for _, digest in self._rows_read():
            sample_id = self._index.find(digest)
            if sample_id is not None and len(runs.get(sample_id, ())) > 1:
                self._read(dataset, sample_id)  # raises, naming the runs

    def _check_some_are_found(self) -> None:
        self._missed += 1
        look = self._missed % max(1, self.row_count // _LOOKS_A_ROUND) == 0
        if look and self._tally is not None and self._tally.in_vain(self.row_count):
            raise SampleNotFound(
                f"none of the last {self.row_count} rows of {self._data_path} that were asked for "
                f"had a sample in {self._source.uri}: nothing is trained any more; capture them "
                "again, and go on from the last checkpoint"
            )

    def _check_finite(self, sample: Sample, states: torch.Tensor) -> None:
        if (found := first_nonfinite(states)) is not None:
            token, column, value = found
            raise NonFinite(
                f"sample {sample.sample_id!r} of run {sample.manifest.run_id!r}: the state of "
                f"token {token} at layer {self._columns[column]} is {value}: see with stagetap "
                "verify whether it was captured so; capture it again, or delete it and train with "
                "--on-missing skip"
            )

    def __getstate__(self) -> dict[str, Any]:
        # A connection is of one process; the index is worth sending.
        return self.__dict__ | {"_dataset": None}
