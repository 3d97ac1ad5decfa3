"""What tensor and expert parallelism divide, and which dimension a refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from stagetap.errors import Refused
from stagetap.plan.parallel import Parallel
from stagetap.plan.read_model import read_model
from stagetap.plan.stages import make_plan
from unit.plan.targets import LLAMA, MOE, target


def test_a_share_and_its_refusal() -> None:
    assert Parallel(1, 4).share("num_attention_heads", 12) == 3
    with pytest.raises(Refused, match="num_attention_heads 12 does not divide by --tp 8; use --tp"):
        Parallel(1, 8).share("num_attention_heads", 12)


@pytest.mark.parametrize(
    ("total", "tp", "local"), [(8, 2, 4), (8, 8, 1), (2, 8, 1), (1, 3, 1), (8, 1, 8)]
)
def test_kv_heads_are_shared_or_copied(total: int, tp: int, local: int) -> None:
    assert Parallel(1, tp).kv_heads(total) == local


@pytest.mark.parametrize(("total", "tp"), [(8, 3), (4, 6), (3, 2)])
def test_kv_heads_that_are_neither(total: int, tp: int) -> None:
    with pytest.raises(Refused, match=f"num_key_value_heads {total} and --tp {tp}: neither"):
        Parallel(1, tp).kv_heads(total)


def test_the_vocabulary_is_padded_to_64() -> None:
    assert Parallel(1, 1).vocabulary(500) == 512
    assert Parallel(1, 8).vocabulary(500) == 64
    with pytest.raises(Refused, match="vocab_size 500, padded to 512, does not divide by --tp 3"):
        Parallel(1, 3).vocabulary(500)


@pytest.mark.parametrize(
    ("changes", "parallel", "said"),
    [
        ({"num_attention_heads": 6}, Parallel(1, 4), "num_attention_heads 6"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, Parallel(1, 2), "value_heads 3"),
        ({"intermediate_size": 258}, Parallel(1, 4), "intermediate_size 258"),
        (
            {
                "vocab_size": 64,
                "num_attention_heads": 6,
                "num_key_value_heads": 6,
                "intermediate_size": 258,
            },
            Parallel(1, 3),
            "vocab_size 64",
        ),
    ],
)
def test_a_dense_model_names_what_does_not_divide(
    changes: dict[str, Any], parallel: Parallel, said: str
) -> None:
    with pytest.raises(Refused) as refused:
        make_plan(read_model({**LLAMA, **changes}), [2], parallel)
    assert said in str(refused.value)


def test_experts_are_cut_or_dealt_out() -> None:
    narrow = read_model({**MOE, "moe_intermediate_size": 66})
    with pytest.raises(Refused, match="moe_intermediate_size 66 does not divide by --tp 4"):
        make_plan(narrow, [2], Parallel(1, 4))
    make_plan(narrow, [2], Parallel(1, 4, expert_parallel=True))
    few = read_model({**MOE, "num_experts": 6})
    with pytest.raises(Refused, match="6 experts do not divide by the 4 ranks"):
        make_plan(few, [2], Parallel(1, 4, expert_parallel=True))


def test_a_quantization_block_is_not_cut() -> None:
    """Qwen3-235B-A22B-FP8 at --tp 8: 1536 / 8 = 192, which vLLM refuses when it loads."""
    config = target("qwen3-235b-a22b")
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    model = read_model(config)
    with pytest.raises(
        Refused, match=r"gate_proj: 192 outputs .* blocks of 128; .*expert-parallel"
    ):
        make_plan(model, [2], Parallel(1, 8))
    make_plan(model, [2], Parallel(1, 4))
    make_plan(model, [2], Parallel(1, 8, expert_parallel=True))


def test_kimi_pads_its_input_projection() -> None:
    """vLLM merges q, k, v, g, f_a and b of KDA: 4 * 1536 + 128 + 12 rows a rank become 6288."""
    model = read_model(target("kimi-k3"))
    weights = model.layers[0].weights(0, model.hidden_size, Parallel(1, 8))
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj", "padding")
    merged = [
        weight.rows for weight in weights if weight.name.endswith(tuple(f".{n}" for n in names))
    ]
    assert sum(merged) == 6288


def test_kimi_pads_narrow_experts() -> None:
    """vLLM widens an expert to 256 a rank where tensor parallelism would leave less."""
    model = read_model(target("kimi-k3"))

    def experts(tp: int) -> int:
        return make_plan(model, [3], Parallel(4, tp)).stages[0].weight_bytes["routed_experts"]

    assert experts(8) * 8 == experts(1)  # 3072 / 8 = 384
    assert experts(32) == experts(16)  # 96 and 192 would both be too narrow
