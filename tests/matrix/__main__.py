"""``./justw matrix``: capture every model of the table on several stages and on one; compare."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from engine.harness import store_folder
from matrix.records import JSON_FILE, MARKDOWN_FILE, encode, merged, read_records
from matrix.render import render
from matrix.rows import MODELS, Row, selected
from matrix.runner import Outcome, Runner
from stagetap.cli.output import notes, print_json, results, table


def main() -> None:
    """Run the rows, write both files and show. Exit code 1 when a row is not as the table says."""
    parser = argparse.ArgumentParser(prog="matrix", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        choices=MODELS,
        help="all rows of these models alone; the others stay as they are in both files",
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    parser.add_argument("--keep", action="store_true", help="keep datasets and logs, say where")
    arguments = parser.parse_args()
    rows = selected(arguments.only)
    with _workplace(arguments.keep) as folder:
        outcomes = list(_run(rows, folder))
    records = [outcome.record for outcome in outcomes if outcome.record is not None]
    everything = merged(read_records(), rows, records)
    JSON_FILE.write_text(encode(everything), "utf-8")
    MARKDOWN_FILE.write_text(render(everything), "utf-8")
    failures = {each.row.name: each.failure for each in outcomes if each.record is None}
    if arguments.json:
        print_json({"records": [asdict(record) for record in records], "failures": failures})
    else:
        results().print(_table(outcomes))
        results().print(f"{len(records)} of {len(rows)} rows as expected; written: {JSON_FILE}")
    for name, failure in failures.items():
        notes().print(f"{name}: {failure}", soft_wrap=True)
    sys.exit(bool(failures))


def _run(rows: list[Row], folder: Path) -> Iterator[Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = notes()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("", total=len(rows))
        runner = Runner(folder, lambda what: progress.update(task, description=what))
        for row in rows:
            outcome = runner.run(row)
            if not console.is_terminal:
                verdict = outcome.record.verdict if outcome.record else f"FAILED {outcome.failure}"
                console.print(f"{row.name}: {verdict}", soft_wrap=True)
            progress.advance(task)
            yield outcome


def _table(outcomes: list[Outcome]) -> Table:
    shown = table("model", "PP", "TP", "dtype", "options", "verdict", "max_abs", "HF error")
    for outcome in outcomes:
        row, record = outcome.row, outcome.record
        numbers = (record.max_abs, record.hf_error) if record else (None, None)
        shown.add_row(
            row.model,
            str(row.pp),
            str(row.tp),
            row.dtype,
            row.options,
            record.verdict if record else "FAILED",
            *("" if number is None else f"{number:.3g}" for number in numbers),
        )
    return shown


@contextmanager
def _workplace(keep: bool) -> Iterator[Path]:
    folder = store_folder("matrix")
    try:
        yield folder
    finally:
        if keep:
            notes().print(f"kept: {folder}")
        else:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
