"""Which stage runs which layers: vLLM's own rule, and every tap has one owner."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagetap.equivalence.partition import owners, parse_partition, stage_layers
from stagetap.errors import Refused
from stagetap.taps import STREAM_MIXTURE

LAYER_COUNTS = [6, 7, 30, 32, 35, 36, 37, 61, 93]
STAGES = [1, 2, 3, 4, 6, 8]


@pytest.fixture(scope="module")
def get_pp_indices() -> Any:
    """vLLM's function, taken out of its source: importing vLLM would cost many seconds."""
    spec = find_spec("vllm")
    assert spec is not None, "set-up installs vLLM"
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "distributed" / "utils.py").read_text("utf-8")
    (function,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "get_pp_indices"
    )
    scope: dict[str, Any] = {
        "envs": SimpleNamespace(VLLM_PP_LAYER_PARTITION=None),
        "logger": SimpleNamespace(info=lambda *_: None),
    }
    exec(compile(ast.Module([function], []), "get_pp_indices", "exec"), scope)
    return scope["get_pp_indices"]


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("layers", LAYER_COUNTS)
def test_the_split_is_that_of_vllm(layers: int, pp: int, get_pp_indices: Any) -> None:
    assert stage_layers(layers, pp) == [get_pp_indices(layers, stage, pp) for stage in range(pp)]


@pytest.mark.parametrize("pp", STAGES)
@pytest.mark.parametrize("layers", LAYER_COUNTS)
def test_every_tap_has_one_owner(layers: int, pp: int) -> None:
    owned = owners(stage_layers(layers, pp), range(layers + 1))
    assert sorted(k for ids in owned.values() for k in ids) == list(range(layers + 1))


def test_an_uneven_partition() -> None:
    stages = stage_layers(30, 3, [2, 0, 28])
    assert stages == [(0, 2), (2, 2), (2, 30)]
    assert owners(stages, [30, 2, 3, 0]) == {0: [0, 2], 2: [3, 30]}


def test_the_mixture_moves_a_boundary_to_the_next_stage() -> None:
    stages = stage_layers(8, 2)
    assert owners(stages, [8, 4, 0]) == {0: [0, 4], 1: [8]}
    assert owners(stages, [8, 4, 0], STREAM_MIXTURE) == {0: [0], 1: [4, 8]}


@pytest.mark.parametrize("partition", [[15, 15, 0], [10, 10], [40, -10], [30]])
def test_a_partition_that_does_not_fit(partition: list[int]) -> None:
    with pytest.raises(Refused, match="must have 2 parts that add up to the 30 layers"):
        stage_layers(30, 2, partition)


def test_reading_a_partition() -> None:
    assert parse_partition("10, 20") == [10, 20]
    for text in ("", "a,b", "10,,20", "10;20"):
        with pytest.raises(Refused, match="write the number of layers"):
            parse_partition(text)
