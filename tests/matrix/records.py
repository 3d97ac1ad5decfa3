"""A row's outcome, and the file that holds them all: docs/models.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matrix.rows import ROWS, Row, Verdict

DOCS = Path(__file__).resolve().parents[2] / "docs"
JSON_FILE, MARKDOWN_FILE = DOCS / "models.json", DOCS / "models.md"


@dataclass(frozen=True)
class Record:
    """What one row has shown.

    Attributes:
        architecture: as the checkpoint's config.json names it.
        against: what it was compared with.
        max_abs: the largest absolute difference to that; None when refused.
        relative: over all prompts and taps, the largest ``|a - b| / |b|`` of a whole tensor.
        bound: what ``relative`` may be; None where only bits count.
        hf_error: the largest error against the Hugging Face forward; None when refused.
        hf_bound: what it may be.
        note: what a reader should know; the line of a refusal.
        versions: what it was found out with.
    """

    model: str
    architecture: str
    pp: int
    tp: int
    dtype: str
    options: str
    against: str
    verdict: Verdict
    max_abs: float | None
    relative: float | None
    bound: float | None
    hf_error: float | None
    hf_bound: float | None
    note: str
    versions: Mapping[str, str]

    @property
    def key(self) -> tuple[str, int, int, str, str]:
        """As of the :class:`Row`."""
        return (self.model, self.pp, self.tp, self.dtype, self.options)


def read_records(path: Path = JSON_FILE) -> list[Record]:
    """The records of a file, none when it is not there."""
    if not path.exists():
        return []
    return [Record(**entry) for entry in json.loads(path.read_text("utf-8"))]


def encode(records: Sequence[Record]) -> str:
    """The records as JSON, one key a line so that a change is seen as one."""
    return json.dumps([asdict(record) for record in records], indent=2) + "\n"


def merged(
    old: Iterable[Record], tried: Iterable[Row], found: Iterable[Record], rows: Sequence[Row] = ROWS
) -> list[Record]:
    """What the file holds after a run, in the order of the table.

    A row that was tried and gave no record loses the one that it had: it failed. So does a row that
    is no longer in the table.
    """
    kept = {record.key: record for record in old}
    for row in tried:
        kept.pop(row.key, None)
    kept |= {record.key: record for record in found}
    return [kept[row.key] for row in rows if row.key in kept]
