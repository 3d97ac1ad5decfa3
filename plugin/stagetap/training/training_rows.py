"""The rows that a draft is trained on, each held against what the trainer takes it for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stagetap.errors import Refused
from stagetap.wording import counted, one_line, shortened

if TYPE_CHECKING:
    from datasets import Dataset

COLUMNS = ("input_ids", "loss_mask", "seq_len")


@dataclass(frozen=True)
class TrainingRow:
    """One row.

    Attributes:
        input_ids: int64 [T].
        loss_tokens: how many of them are learnt from, without those that a batch cuts off.
    """

    input_ids: np.ndarray
    loss_tokens: int


class TrainingRows:
    """A folder of rows. May be pickled; each process opens it for itself."""

    def __init__(self, folder: str | Path, total_seq_len: int | None) -> None:
        """
        Args:
            total_seq_len: tokens of a batch, to which a longer row is cut; None for no limit.
        """
        self._folder = str(folder)
        self._total_seq_len = total_seq_len
        self._table: Any = None

    def __len__(self) -> int:
        """How many. Raises Refused as reading one."""
        return len(self._opened())

    def __iter__(self) -> Iterator[TrainingRow]:
        """All of them, in their order. Raises Refused as reading one."""
        for position, columns in enumerate(self._opened()):
            yield self._row(position, columns)

    def __getitem__(self, position: int) -> TrainingRow:
        """One row.

        Raises:
            Refused: the folder is none of rows, or this row contradicts itself.
        """
        return self._row(position, self._opened()[position])

    def lengths(self) -> list[int]:
        """Tokens of each row, as the trainer packs them. Raises Refused as reading one."""
        return list(self._opened().with_format(None)["seq_len"])

    def _opened(self) -> Any:
        if self._table is None:
            self._table = _open_table(self._folder).select_columns(list(COLUMNS))
            self._table.set_format("numpy")
        return self._table

    def _row(self, position: int, columns: Mapping[str, Any]) -> TrainingRow:
        input_ids, loss_mask = (np.asarray(columns[name]) for name in COLUMNS[:2])
        if input_ids.ndim != 1 or (len(input_ids) and input_ids.dtype.kind not in "iu"):
            found = "its input_ids are no list of token ids"
        elif loss_mask.shape != input_ids.shape:
            found = f"its loss_mask has {loss_mask.size} entries for {len(input_ids)} input_ids"
        elif not np.isin(loss_mask, (0, 1)).all():
            found = "its loss_mask has other entries than 0 and 1"
        elif columns["seq_len"] != len(input_ids):
            found = f"its seq_len is {columns['seq_len']} for {len(input_ids)} input_ids"
        else:
            learnt = loss_mask[: self._total_seq_len]
            return TrainingRow(input_ids.astype(np.int64, copy=False), int(learnt.sum()))
        raise Refused(
            f"row {position} of {self._folder}: {found}: write the rows again, with stagetap rows "
            "or speculators prepare-data"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}


def check_learnt_from(
    loss_tokens: Collection[int], folder: str | Path, total_seq_len: int | None
) -> None:
    """Raises Refused when no row has a token to learn from; `loss_tokens` are those of each."""
    if loss_tokens and not any(loss_tokens):
        within = f" within --total-seq-len {total_seq_len}" if total_seq_len else ""
        raise Refused(
            f"none of {counted(len(loss_tokens), 'row')} of {folder} has a token to learn "
            f"from{within}: write rows with another --learn-from, or give room for longer ones"
        )


def _open_table(folder: str) -> Dataset:
    """The table of a folder, which speculators reads in the same form.

    Raises:
        Refused: there is none, it is damaged or empty, or it is not as speculators reads it.
    """
    from datasets import Dataset, load_from_disk

    cure = "give one of stagetap rows or speculators prepare-data"
    try:
        table = load_from_disk(folder)
    except IndexError:  # there is no table of which the first could be taken
        raise Refused(f"{folder} has no rows: {cure}") from None
    # What a file gives that is missing, cut, no JSON, or JSON of another kind.
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(
            f"{folder} is no folder of rows ({shortened(one_line(error), 200)}): {cure}"
        ) from error
    if not isinstance(table, Dataset):
        raise Refused(f"{folder} holds several tables ({', '.join(table)}): name the folder of one")
    if lacking := [name for name in COLUMNS if name not in table.column_names]:
        raise Refused(f"the rows of {folder} have no {' and no '.join(lacking)}: {cure}")
    shown = table.format
    if shown["type"] != "torch" or not set(COLUMNS) <= set(shown["columns"]):
        raise Refused(
            f"{folder} was saved in another form than torch, the trainer's: save the table after "
            'with_format("torch")'
        )
    if not len(table):
        raise Refused(f"{folder} has no rows: {cure}")
    return table
