"""Owners, bytes and capacities of a plan, by hand on a small model."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.plan.document import plan_document, remarks
from stagetap.plan.parallel import Parallel
from stagetap.plan.read_model import read_model
from stagetap.plan.stages import Budget, make_plan
from unit.plan.targets import LLAMA, MOE, target

LAYER_BYTES = 2 * (128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 3 * 128 * 256 + 2 * 128)
EMBEDDING_BYTES = 2 * 512 * 128  # padded to 64
NORM_BYTES = 2 * 128
ROW = 128 * 2


def test_two_stages_by_hand() -> None:
    plan = make_plan(read_model(LLAMA), [6, 2, 0, 3], Parallel(2, 1), batched_tokens=64)
    first, last = plan.stages
    assert (first.layer_ids, last.layer_ids) == ((0, 2, 3), (6,))
    assert plan.layer_ids == (6, 2, 0, 3)
    assert sum(first.weight_bytes.values()) == 3 * LAYER_BYTES + EMBEDDING_BYTES
    assert sum(last.weight_bytes.values()) == 3 * LAYER_BYTES + EMBEDDING_BYTES + NORM_BYTES
    assert first.weight_bytes["replicated"] == 3 * 2 * NORM_BYTES
    assert first.kv_token_bytes == 3 * 2 * 2 * 32 * 2
    assert (first.tap_token_bytes, last.tap_token_bytes) == (3 * ROW, ROW)
    assert (first.capture_bytes, last.capture_bytes) == (3 * 64 * ROW, 64 * ROW)
    assert plan.stored_token_bytes == 4 * ROW + 8
    assert plan.relay_token_bytes == 3 * ROW
    assert (plan.tokens, plan.fits, plan.advice) == (None, None, None)


def test_tied_embeddings_lie_on_both_ends() -> None:
    tied = read_model({**LLAMA, "tie_word_embeddings": True})
    alone = make_plan(tied, [2], Parallel(1, 1)).stages[0]
    assert sum(alone.weight_bytes.values()) == 6 * LAYER_BYTES + EMBEDDING_BYTES + NORM_BYTES
    first, last = make_plan(tied, [2], Parallel(2, 1)).stages
    assert sum(last.weight_bytes.values()) - sum(first.weight_bytes.values()) == NORM_BYTES


def test_some_models_hold_both_ends_on_every_stage() -> None:
    """As vLLM 0.32.0 builds Qwen3-MoE; Qwen3-Next leaves the norm to the last stage."""
    first, middle, last = make_plan(read_model(MOE), [2], Parallel(3, 1)).stages
    assert first.weight_bytes == middle.weight_bytes == last.weight_bytes
    tied = make_plan(read_model({**MOE, "tie_word_embeddings": True}), [2], Parallel(3, 1)).stages[
        1
    ]
    assert middle.weight_bytes["sharded"] - tied.weight_bytes["sharded"] == EMBEDDING_BYTES


def test_tensor_parallelism_shares_what_it_can() -> None:
    model = read_model(LLAMA)
    (one,) = make_plan(model, [2], Parallel(1, 1)).stages
    (two,) = make_plan(model, [2], Parallel(1, 2)).stages
    (four,) = make_plan(model, [2], Parallel(1, 4)).stages
    assert two.weight_bytes["sharded"] * 2 == one.weight_bytes["sharded"]
    assert two.weight_bytes["replicated"] == one.weight_bytes["replicated"]
    assert two.kv_token_bytes * 2 == one.kv_token_bytes
    # Two KV heads for four ranks: each rank holds one, and its projections.
    assert four.kv_token_bytes == two.kv_token_bytes
    assert four.weight_bytes["sharded"] * 4 == one.weight_bytes["sharded"] + 6 * 2 * 2 * 64 * 128
    # Every rank has pages and buffers for whole rows.
    assert two.tap_token_bytes == one.tap_token_bytes


def test_expert_parallelism_deals_experts_out() -> None:
    model = read_model(MOE)
    (cut,) = make_plan(model, [2], Parallel(1, 4)).stages
    (dealt,) = make_plan(model, [2], Parallel(1, 4, expert_parallel=True)).stages
    assert cut.weight_bytes == dealt.weight_bytes
    assert cut.weight_bytes["routed_experts"] == 6 * 8 * 3 * 128 * 64 * 2 // 4


@pytest.mark.parametrize(("dtype", "itemsize"), [("auto", 2), ("fp8", 1), ("float32", 4)])
def test_the_kv_cache_may_have_a_dtype_of_its_own(dtype: str, itemsize: int) -> None:
    plan = make_plan(read_model(LLAMA), [2], Parallel(1, 1), kv_cache_dtype=dtype)
    assert plan.stages[0].kv_token_bytes == 6 * 2 * 2 * 32 * itemsize
    assert plan.stages[0].tap_token_bytes == ROW


def test_latent_attention_is_on_every_rank() -> None:
    """DeepSeek-V3: 576 values a token and layer, whatever --tp says; K3's KDA layers cache none."""
    model = read_model(target("deepseek-v3"))
    for tp in (1, 8):
        (stage,) = make_plan(model, [2], Parallel(1, tp)).stages
        assert stage.kv_token_bytes == 61 * 576 * 2
    (stage,) = make_plan(read_model(target("kimi-k3")), [3], Parallel(1, 8)).stages
    assert stage.kv_token_bytes == 24 * 576 * 2
    # A state of 12 heads, 128 x 128 in float32, and 3 rows of convolution, on each of 69 layers.
    assert stage.state_bytes == 69 * 12 * (128 * 128 * 4 + 3 * 128 * 3 * 2)


def test_windows_are_bounded() -> None:
    sliding = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 16}
    for length in (8, 512):
        plan = make_plan(read_model(sliding), [2], Parallel(1, 1), sequence_tokens=length)
        (stage,) = plan.stages
        assert stage.kv_token_bytes == 3 * 2 * 2 * 32 * 2
        assert stage.window_bytes == 3 * 2 * 2 * 32 * 2 * min(length, 32)
        assert any("whole pages" in remark for remark in remarks(plan))


def test_capacity_is_that_of_the_smallest_stage() -> None:
    budget = Budget(gpu_bytes=4_000_000, utilization=0.9, reserve_bytes=100_000)
    plan = make_plan(read_model(LLAMA), [5, 6], Parallel(2, 1), batched_tokens=64, budget=budget)
    first, last = plan.stages
    assert first.available_bytes == 3_500_000 - first.fixed_bytes
    assert first.tokens == first.available_bytes // first.kv_token_bytes
    assert last.tokens is not None
    assert last.available_bytes is not None
    assert last.tokens == last.available_bytes // (last.kv_token_bytes + 2 * ROW)
    assert plan.tokens == last.tokens
    assert plan.fits
    assert plan.advice is not None
    assert plan.advice.partition == (4, 2)
    assert not plan.advice_without_taps


def test_a_model_that_does_not_fit() -> None:
    budget = Budget(gpu_bytes=1_500_000, utilization=0.9, reserve_bytes=0)
    plan = make_plan(read_model(LLAMA), [2], Parallel(1, 1), budget=budget)
    assert plan.fits is False
    assert plan.tokens == 0


def test_a_longest_sequence_is_needed() -> None:
    novel = {**LLAMA, "model_type": "novel", "tie_word_embeddings": False}
    endless = {key: value for key, value in novel.items() if key != "max_position_embeddings"}
    with pytest.raises(Refused, match="--max-len"):
        make_plan(read_model(endless), [2], Parallel(1, 1))
    assert make_plan(read_model(endless), [2], Parallel(1, 1), sequence_tokens=9).tokens is None


@pytest.mark.parametrize(
    ("ids", "settings", "said"),
    [
        ([7], {}, "7 is above 6"),
        ([2], {"partition": [3, 2]}, "add up to the 6 layers"),
        ([2], {"kv_cache_dtype": "int3"}, "--kv-cache-dtype int3"),
    ],
)
def test_what_is_refused(ids: list[int], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        make_plan(read_model(LLAMA), ids, Parallel(2, 1), **settings)
    with pytest.raises(Refused, match="7 pipeline stages"):
        make_plan(read_model(LLAMA), [2], Parallel(7, 1))


@given(
    st.integers(1, 6),
    st.sets(st.integers(0, 6), min_size=1),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_stages_add_up(pp: int, ids: set[int], tp: int, expert_parallel: bool) -> None:
    """Whatever the layout, the parts are those of the whole, where no stage holds another's."""
    model = read_model({**MOE, "model_type": "novel_moe", "tie_word_embeddings": False})
    plan = make_plan(model, sorted(ids), Parallel(pp, tp, expert_parallel), batched_tokens=1)
    (whole,) = make_plan(model, sorted(ids), Parallel(1, tp, expert_parallel)).stages
    assert sorted(k for stage in plan.stages for k in stage.layer_ids) == sorted(ids)
    for kind, size in whole.weight_bytes.items():
        assert sum(stage.weight_bytes[kind] for stage in plan.stages) == size
    assert sum(stage.kv_token_bytes for stage in plan.stages) == whole.kv_token_bytes
    assert sum(stage.tap_token_bytes for stage in plan.stages) == len(ids) * ROW
    # What is handed on from stage to stage: every tap once for each boundary that it crosses.
    crossings = sum(
        1 for stage in plan.stages for k in stage.layer_ids for _ in range(stage.index, pp - 1)
    )
    assert plan.relay_token_bytes == crossings * ROW


def test_the_document_says_it_all() -> None:
    budget = Budget(gpu_bytes=4_000_000, utilization=0.9, reserve_bytes=100_000)
    plan = make_plan(read_model(LLAMA), [5, 6], Parallel(2, 1), batched_tokens=64, budget=budget)
    document = plan_document(plan, "tiny")
    assert document["roles"] == {"5": "aux", "6": "last"}
    assert document["kv_tokens"] == plan.tokens
    assert document["advice"]["partition"] == (4, 2)
    assert document["advice"]["line"].endswith("VLLM_PP_LAYER_PARTITION=4,2")
    assert [stage["layers"] for stage in document["stages"]] == [[0, 3], [3, 6]]
    assert document["stages"][1]["fixed_bytes"] == plan.stages[1].fixed_bytes
    assert document["stored_bytes_per_1000_tokens"] == 1000 * (2 * ROW + 8)
