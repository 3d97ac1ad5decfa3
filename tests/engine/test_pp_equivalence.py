"""What the reader returns from several stages is, bit for bit, what it returns from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.conftest import LENGTHS
from engine.distance import relative_error
from engine.harness import random_prompts
from stagetap.equivalence.compare import compare_datasets

pytestmark = pytest.mark.engine

# One stage captures every id; the arms ask for some of them, never in ascending order.
TINY_ALL = [6, 5, 4, 3, 2, 1, 0]
TINY_LAYERS = [6, 0, 3, 2, 4]  # 0, N, and the stage boundaries at PP=2 (3) and PP=3 (2, 4)
NO_TAP_ON_STAGE_1 = [1, 6, 0]  # with the layers parted 1,4,1
SMOLLM2_LAYERS = [30, 2, 0, 15, 16, 10, 27]


def tiny_prompts() -> dict[str, list[int]]:
    """Each length once, and two prompts that share more than two pages."""
    prompts = {f"length-{n}": ids for n, ids in zip(LENGTHS, random_prompts(LENGTHS), strict=True)}
    shared = prompts["length-400"][:300]
    for number in range(2):
        prompts[f"shared-{number}"] = shared + random_prompts([17], seed=number + 1)[0]
    # The same prompt again: every page but the last comes from the prefix cache.
    prompts["again"] = list(prompts["length-400"])
    return prompts


def smollm2_prompts() -> dict[str, list[int]]:
    lengths = (1, 7, 33, 129, 400)
    prompts = random_prompts(lengths, seed=7, vocabulary=49000)
    return {f"length-{n}": ids for n, ids in zip(lengths, prompts, strict=True)}


ARMS = [
    pytest.param("llama", TINY_LAYERS, {"pp": 2, "max_num_batched_tokens": 64}, id="llama-chunked"),
    pytest.param("qwen3", NO_TAP_ON_STAGE_1, {"pp": 3, "partition": "1,4,1"}, id="qwen3-uneven"),
    *(
        pytest.param(family, TINY_LAYERS, arm, id=f"{family}-{name}", marks=pytest.mark.full)
        for family, name, arm in [
            ("llama", "pp2", {"pp": 2}),
            ("llama", "pp3", {"pp": 3}),
            ("llama", "pp4-uneven", {"pp": 4, "partition": "2,1,2,1"}),
            ("qwen3", "pp2", {"pp": 2}),
            ("qwen2", "pp2", {"pp": 2}),
        ]
    ),
    *(
        pytest.param("smollm2", SMOLLM2_LAYERS, arm, id=f"smollm2-{name}", marks=pytest.mark.full)
        for name, arm in [
            ("pp2-chunked", {"pp": 2, "max_num_batched_tokens": 64}),
            ("pp3-uneven", {"pp": 3, "partition": "7,16,7"}),
        ]
    ),
]


def reference_of(captured: Callable[..., Any], family: str) -> Any:
    """The single-stage dataset that all arms of a family are compared with."""
    if family == "smollm2":
        return captured(family, smollm2_prompts(), SMOLLM2_LAYERS, pp=1)
    return captured(family, tiny_prompts(), TINY_ALL, pp=1)


@pytest.mark.parametrize(("family", "layers", "arm"), ARMS)
def test_stages_equal_one_stage(
    captured: Callable[..., Any], family: str, layers: list[int], arm: dict[str, Any]
) -> None:
    prompts = smollm2_prompts() if family == "smollm2" else tiny_prompts()
    reference = reference_of(captured, family)
    staged = captured(family, prompts, layers, **arm)
    assert set(staged.sample_ids) == set(prompts)
    for name, ids in prompts.items():
        sample, expected = staged[name], reference[name]
        last = sample.manifest.tapped.num_hidden_layers
        assert sample.input_ids.tolist() == ids
        assert sample.layer_ids == tuple(k for k in layers if k != last)
        assert sample.hidden_states.shape[:2] == (len(ids), len(layers) - 1)
        for column, layer in enumerate(sample.layer_ids):
            assert_same_bits(sample.hidden_states[:, column], expected.layer(layer), name, layer)
        assert_same_bits(sample.last_hidden_states, expected.layer(last), name, last)


def assert_same_bits(ours: torch.Tensor, expected: torch.Tensor, *where: Any) -> None:
    assert ours.dtype == expected.dtype, where
    assert ours.shape == expected.shape, where
    assert expected.double().norm() > 0, where
    difference = (ours.double() - expected.double()).abs().max()
    assert torch.equal(ours.view(torch.int16), expected.view(torch.int16)), (where, difference)


def test_every_stage_wrote_its_own_taps_and_no_other(captured: Callable[..., Any]) -> None:
    staged = captured("llama", tiny_prompts(), TINY_LAYERS, pp=2, max_num_batched_tokens=64)
    for sample in staged:
        layers = [[layer.id for layer in part.layers] for part in sample.manifest.fragments]
        assert layers == [[0, 2, 3], [4, 6]]


def test_a_cached_prefix_yields_the_rows_of_a_cold_run(captured: Callable[..., Any]) -> None:
    prompts = tiny_prompts()
    staged = captured("llama", prompts, TINY_LAYERS, pp=2, max_num_batched_tokens=64)
    cold, warm = staged["length-400"], staged["again"]
    for layer in TINY_LAYERS:
        assert torch.equal(cold.layer(layer), warm.layer(layer)), layer


def test_a_stage_that_owns_no_tap_stores_nothing(captured: Callable[..., Any]) -> None:
    staged = captured("qwen3", tiny_prompts(), NO_TAP_ON_STAGE_1, pp=3, partition="1,4,1")
    for sample in staged:
        assert [fragment.stage for fragment in sample.manifest.fragments] == [0, 2]
        assert sample.manifest.tapped.pp_layers == ((0, 1), (1, 5), (5, 6))


@pytest.mark.full
def test_tensor_parallel_stages_equal_one_tensor_parallel_stage(
    captured: Callable[..., Any],
) -> None:
    prompts = tiny_prompts()
    one = captured("llama", prompts, TINY_LAYERS, pp=1, tp=2)
    two = captured("llama", prompts, TINY_LAYERS, pp=2, tp=2)
    comparison = compare_datasets(one, two, prompts)
    assert comparison.bitwise, "\n".join(comparison.findings())
    assert all(sample.manifest.tapped.tp_size == 2 for sample in two)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_models_dtype_is_kept(captured: Callable[..., Any], dtype: str) -> None:
    prompts = {"a": random_prompts([50])[0]}
    one = captured("llama", prompts, TINY_LAYERS, pp=1, dtype=dtype)
    two = captured("llama", prompts, TINY_LAYERS, pp=2, dtype=dtype)
    assert two["a"].hidden_states.dtype == getattr(torch, dtype)
    comparison = compare_datasets(one, two, prompts)
    assert comparison.bitwise, "\n".join(comparison.findings())


@pytest.mark.full
def test_a_quantized_kv_cache_leaves_the_taps_dtype_alone(captured: Callable[..., Any]) -> None:
    prompts = {"a": random_prompts([50])[0]}
    one = captured("llama", prompts, TINY_LAYERS, pp=1, kv_cache_dtype="fp8")
    two = captured("llama", prompts, TINY_LAYERS, pp=2, kv_cache_dtype="fp8")
    assert two["a"].hidden_states.dtype == torch.bfloat16
    assert two["a"].manifest.tapped.kv_cache_dtype == "fp8"
    comparison = compare_datasets(one, two, prompts)
    assert comparison.bitwise, "\n".join(comparison.findings())


@pytest.mark.full
def test_many_at_once_keep_their_own_rows(captured: Callable[..., Any]) -> None:
    """Batch composition moves bf16 by a few ULP: each sample stays nearest to its own reference."""
    lengths = [5 + 7 * n for n in range(20)]
    prompts = {f"p{n}": ids for n, ids in enumerate(random_prompts(lengths, seed=3))}
    alone = captured("llama", prompts, TINY_LAYERS, pp=2)
    together = captured("llama", prompts, TINY_LAYERS, pp=2, in_flight=20)
    for name, ids in prompts.items():
        ours = together[name]
        assert ours.input_ids.tolist() == ids
        for layer in TINY_LAYERS:
            error = relative_error(ours.layer(layer), alone[name].layer(layer))
            assert error <= 1e-2, (name, layer, error)
