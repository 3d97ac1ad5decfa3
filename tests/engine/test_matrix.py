"""docs/models.json is true: its rows are captured anew, and come out as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from matrix.records import read_records
from matrix.rows import ROWS, Row
from matrix.runner import Runner

pytestmark = pytest.mark.engine

CI = {
    "granite": "tap code that is called, with indices that start at 0 on every stage",
    "deepseek-v3": "tap code that appends what was asked for, before a layer",
    "gemma3": "no tap code, layers that give the stream in two parts",
    "cohere": "no tap code, layers that hand on a tensor beside the stream that nobody reads",
    "transformers-backend": "no tap code, layers that give it whole, with a batch dimension",
    "qwen3-vl": "a stream that changes between two layers",
}
"""Models whose plain row is tried in CI, one for every form of capture."""

SAID = {record.key: record for record in read_records()}


def _parameter(row: Row) -> object:
    in_ci = row.model in CI and row == Row(row.model, note=row.note)
    return pytest.param(row, id=row.name, marks=[] if in_ci else pytest.mark.full)


@pytest.fixture(scope="module")
def runner(stores: Callable[[str], Path]) -> Runner:
    return Runner(stores("matrix"), print)


@pytest.mark.parametrize("row", [_parameter(row) for row in ROWS if row.key in SAID])
def test_a_row_comes_out_as_the_page_says(runner: Runner, row: Row) -> None:
    outcome = runner.run(row)
    assert outcome.record is not None, outcome.failure
    assert outcome.record.verdict == SAID[row.key].verdict
