"""docs/models.md out of docs/models.json: a pure function, so a test can hold both together."""

from __future__ import annotations

from collections.abc import Sequence

from matrix.records import Record
from matrix.rows import ROWS, Row

_HEAD = """\
# Models

Every row was found out by capturing: `./justw matrix` makes a tiny random checkpoint of the model
(`smollm2` is the real SmolLM2-135M-Instruct), captures prompts of 1 to 400 tokens through the
production connector on several stages and on one, each in its own process and one request at a
time, one prompt of the `-vl` models with an image, reads both datasets with the reader and
compares every bit of every layer id, 0 and N included. This page is rendered from
[models.json](models.json); edit neither.

- **bitwise**: equal in every bit.
- **bounded**: not bitwise, for the reason in the note, and within the relative error given there.
- **refused**: StageTap says no before it serves, with the line in the note.
- **max abs**: the largest absolute difference to the arm that it was compared with.
- **HF error**: distance to a Hugging Face forward of the same checkpoint in float32: by tap,
  `|a - b| / |b|` of the worst token in float32 rows, the median over tokens in others, where a
  token may go to another expert; the largest of all taps and prompts. The limit beside it is twice
  what transformers itself loses by rounding as the row's engine does, 0.0001 in float32 rows. Over
  the tokens of all prompts every tap was at least twice as close to its own layer as to any other.
"""

_HEADERS = (
    "model",
    "architecture",
    "PP",
    "TP",
    "dtype",
    "options",
    "compared with",
    "verdict",
    "max abs",
    "HF error (limit)",
    "note",
)


def render(records: Sequence[Record], rows: Sequence[Row] = ROWS) -> str:
    """The page; rows of the table that have no record yet are named at its end."""
    lines = [_row(_HEADERS), _row(["---"] * len(_HEADERS))]
    lines += [_row(_cells(record)) for record in records]
    models = sorted({record.model for record in records if record.verdict != "refused"})
    versions = sorted({_versions(record) for record in records})
    return "\n".join(
        [
            _HEAD,
            f"Captured: {len(models)} models, {len(records)} rows.",
            "",
            *lines,
            "",
            "Found out with:",
            "",
            *(f"- {line}" for line in versions),
            "",
            *_open(records, rows),
        ]
    )


def _open(records: Sequence[Record], rows: Sequence[Row]) -> list[str]:
    known = {record.key for record in records}
    missing = [row.name for row in rows if row.key not in known]
    if not missing:
        return []
    return ["Not shown yet, so claim nothing of them:", "", *(f"- {name}" for name in missing), ""]


def _cells(record: Record) -> list[str]:
    return [
        record.model,
        record.architecture,
        str(record.pp),
        str(record.tp),
        record.dtype,
        record.options,
        record.against,
        record.verdict,
        _number(record.max_abs),
        "" if record.hf_error is None else f"{record.hf_error:.2g} ({record.hf_bound:.2g})",
        _note(record),
    ]


def _note(record: Record) -> str:
    if record.verdict != "bounded":
        return record.note
    bound = f"relative error {record.relative:.2g}, at most {record.bound:g}"
    return f"{bound}; {record.note}" if record.note else bound


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items()))


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
