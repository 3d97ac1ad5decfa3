"""Which stage runs which layers: vLLM's own rule, and every tap has one owner."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stagetap.errors import Refused
from stagetap.partition import (
    PARTITION_ENV,
    engine_stages,
    owners,
    parse_partition,
    stage_layers,
)
from stagetap.taps import STREAM_MIXTURE

LAYER_COUNTS = [8, 9, 30, 32, 35, 36, 37, 61, 93]
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
    stages = stage_layers(30, 3, [2, 1, 27])
    assert stages == [(0, 2), (2, 3), (3, 30)]
    assert owners(stages, [30, 2, 0]) == {0: [0, 2], 2: [30]}


def test_the_mixture_moves_a_boundary_to_the_next_stage() -> None:
    stages = stage_layers(8, 2)
    assert owners(stages, [8, 4, 0]) == {0: [0, 4], 1: [8]}
    assert owners(stages, [8, 4, 0], STREAM_MIXTURE) == {0: [0], 1: [4, 8]}


@pytest.mark.parametrize("partition", [[15, 15, 0], [10, 10], [40, -10], [30]])
def test_a_partition_that_does_not_fit(partition: list[int]) -> None:
    with pytest.raises(Refused, match="must have 2 parts that add up to the 30 layers"):
        stage_layers(30, 2, partition)


@pytest.mark.parametrize(("partition", "stage"), [([0, 15, 15], 0), ([15, 0, 15], 1)])
def test_a_stage_without_a_layer(partition: list[int], stage: int) -> None:
    with pytest.raises(Refused, match=f"leaves stage {stage} without a decoder layer"):
        stage_layers(30, 3, partition)


def test_more_stages_than_layers() -> None:
    assert len(stage_layers(6, 6)) == 6
    with pytest.raises(Refused, match="7 pipeline stages are more than the model's 6"):
        stage_layers(6, 7)


def test_the_partition_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARTITION_ENV, raising=False)
    assert engine_stages(6, 2) == [(0, 3), (3, 6)]
    monkeypatch.setenv(PARTITION_ENV, "1,5")
    assert engine_stages(6, 2) == [(0, 1), (1, 6)]
    for text in ("1,4", "0,6", "2,2,2", "", "one"):
        monkeypatch.setenv(PARTITION_ENV, text)
        with pytest.raises(Refused, match=f"{PARTITION_ENV}: partition .* or unset the variable"):
            engine_stages(6, 2)


def test_reading_a_partition() -> None:
    assert parse_partition("10, 20") == [10, 20]
    for text in ("", "a,b", "10,,20", "10;20"):
        with pytest.raises(Refused, match="write the number of layers"):
            parse_partition(text)
