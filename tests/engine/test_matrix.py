"""docs/models.json is true: its rows are captured anew, and come out as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import tiny_checkpoint
from matrix.capacity import measure
from matrix.records import read_records
from matrix.rows import ROWS, Row, layer_ids
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

OVERCHARGE = 0.05


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


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "qwen3-next"])
@pytest.mark.full
def test_capture_costs_the_kv_cache_its_bytes(
    family: str, pp: int, tmp_path: Path, stores: Callable[[str], Path]
) -> None:
    """Within 5 % of the arithmetic share, in models with several kinds of attention."""
    checkpoint = tiny_checkpoint(family, tmp_path, max_position_embeddings=16384)
    layers = layer_ids(8 if family == "qwen3-next" else 6)
    capacity = measure(checkpoint, layers, pp, stores("capacity"))
    print(
        f"{family} PP={pp}: {capacity.tokens_without} tokens without capture, "
        f"{capacity.tokens_with} with: {capacity.share:.3f}, arithmetic "
        f"{capacity.arithmetic_share:.3f}"
    )
    assert capacity.overcharge <= OVERCHARGE
