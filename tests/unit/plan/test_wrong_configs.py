"""Whatever stands in a config.json: a plan, or one line that names file, key and cure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagetap.config_values import MAX_LAYERS, MAX_SIZE
from stagetap.errors import Refused
from stagetap.plan.parallel import Parallel
from stagetap.plan.read_model import read_model
from stagetap.plan.stages import make_plan
from stagetap.plan.untold import NO_DECODER, UNTOLD
from unit.plan.targets import LLAMA, MOE, target

FILE = "config.json of some/model"
QWEN3_NEXT: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_next",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}


def kda(**changes: Any) -> dict[str, Any]:
    return {"linear_attn_config": {"num_heads": 2, "head_dim": 8, **changes}}


def packed(config_groups: Any, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": config_groups, **changes}


def group(**weights: Any) -> dict[str, Any]:
    return {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, **weights}}}


GROUPED = group(strategy="group", group_size=32)
WRONG_QUANTIZATIONS: list[tuple[Any, str]] = [
    ("fp8", "quantization_config is 'fp8'"),
    (5, "quantization_config is 5"),
    ([1], "quantization_config is [1]"),
    ({"quant_method": 5}, "quant_method is 5"),
    ({"quant_method": "fp8", "weight_block_size": 5}, "weight_block_size is 5"),
    ({"quant_method": "fp8", "weight_block_size": [0, 0]}, "weight_block_size is [0, 0]"),
    ({"quant_method": "fp8", "weight_block_size": ["a", "b"]}, "weight_block_size is ['a', 'b']"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "not two sizes"),
    ({"quant_method": "fp8", "modules_to_not_convert": 5}, "modules_to_not_convert is 5"),
    ({"quant_method": "fp8", "ignored_layers": "lm_head"}, "ignored_layers is 'lm_head'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size is 0"),
    ({"quant_method": "awq", "bits": 4, "group_size": -5}, "group_size is -5"),
    ({"quant_method": "awq", "bits": -4, "group_size": 128}, "bits is -4"),
    ({"quant_method": "gptq", "bits": 10**6, "group_size": 128}, "bits is 1000000"),
    (packed([1]), "config_groups is [1]"),
    (packed({"g": 5}), "config_groups: g is 5"),
    (packed({"g": {"weights": 5}}), "g: weights is 5"),
    (packed({"g": {"weights": {}}}), "g: weights says no num_bits"),
    (packed({"g": {**GROUPED["g"], "targets": ["re:("]}}), "targets is ['re:(']"),
    (packed(GROUPED, ignore=5), "ignore is 5"),
    (packed(GROUPED, ignore=["re:("]), "ignore is ['re:(']"),
    (packed(group(strategy="block")), "block_structure is None"),
    (packed(group(strategy="block", block_structure=[1, 2, 3])), "not two sizes"),
    (packed(group(strategy="group", group_size=0)), "group_size is 0"),
    (packed(group(strategy=["group"])), "strategy is ['group']"),
]
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"model_type": 5}, "model_type is 5"),
    (LLAMA, {"text_config": 5}, "text_config is 5"),
    (LLAMA, {"text_config": [1]}, "text_config is [1]"),
    (LLAMA, {"num_hidden_layers": 1_000_000}, "num_hidden_layers is 1000000"),
    (LLAMA, {"num_hidden_layers": -2}, "num_hidden_layers is -2"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    (LLAMA, {"hidden_size": 10**30}, "hidden_size is 1000000"),
    (LLAMA, {"vocab_size": 10**5000}, "vocab_size is int too large to show"),
    (LLAMA, {"torch_dtype": 5, "dtype": None}, "torch_dtype is 5"),
    (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'"),
    (LLAMA, {"attention_bias": 1}, "attention_bias is 1"),
    (LLAMA, {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    (LLAMA, {"layer_types": 5}, "layer_types is 5"),
    (LLAMA, {"layer_types": [["full_attention"]] * 6}, "layer_types is [["),
    (LLAMA, kda(kda_layers=5), "linear_attn_config: kda_layers is 5"),
    (LLAMA, kda(kda_layers=["a"]), "linear_attn_config: kda_layers is ['a']"),
    (LLAMA, {"linear_attn_config": 5}, "linear_attn_config is 5"),
    (QWEN3_NEXT, {"full_attention_interval": 0}, "full_attention_interval is 0"),
    (QWEN3_NEXT, {"full_attention_interval": "x"}, "full_attention_interval is 'x'"),
    (QWEN3_NEXT, {"mamba_ssm_dtype": 5}, "mamba_ssm_dtype is 5"),
    (
        LLAMA,
        {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 0},
        "sliding_window_pattern is 0",
    ),
    (LLAMA, {"num_key_value_heads": 0}, "num_key_value_heads is 0, not a size"),
    (LLAMA, {"num_attention_heads": 4, "num_key_value_heads": 5}, "4 is no multiple of"),
    (QWEN3_NEXT, {"linear_num_value_heads": 3, "linear_num_key_heads": 2}, "3 is no multiple of"),
    (LLAMA, {"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'"),
    (LLAMA, {"head_dim": 0}, "head_dim is 0, not a size"),
    (LLAMA, {"max_position_embeddings": 0}, "max_position_embeddings is 0, not a size"),
    (LLAMA, {"attn_type_list": "full"}, "attn_type_list is 'full'"),
    (MOE, {"moe_intermediate_size": []}, "moe_intermediate_size is [], not a size"),
    (MOE, {"moe_intermediate_size": ["64"] * 6}, "moe_intermediate_size is ['64'"),
    (MOE, {"first_k_dense_replace": "x"}, "first_k_dense_replace is 'x'"),
    (MOE, {"moe_layer_freq": 0}, "moe_layer_freq is 0"),
    (MOE, {"moe_layer_freq": "x"}, "moe_layer_freq is 'x'"),
    (MOE, {"moe_layer_freq": [1]}, "moe_layer_freq is [1], not a 0 or 1 for every layer"),
    (MOE, {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
    (MOE, {"mlp_only_layers": 5}, "mlp_only_layers is 5"),
    (MOE, {"mlp_only_layers": "x"}, "mlp_only_layers is 'x'"),
    *[(LLAMA, {"quantization_config": config}, said) for config, said in WRONG_QUANTIZATIONS],
]


@pytest.mark.parametrize(("base", "changes", "said"), WRONG)
def test_file_and_key_are_named(base: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as refused:
        read_model({**base, **changes}, FILE)
    message = str(refused.value)
    assert message.startswith(FILE)
    assert said in message
    assert "; give the config.json that" in message
    assert "\n" not in message
    assert len(message) < 400


def test_the_bounds_are_sizes() -> None:
    assert read_model({**LLAMA, "num_hidden_layers": MAX_LAYERS}).num_hidden_layers == MAX_LAYERS
    assert read_model({**LLAMA, "vocab_size": MAX_SIZE}).vocab_size == MAX_SIZE


@pytest.mark.parametrize("key", NO_DECODER)
def test_what_has_no_decoder_alone(key: str) -> None:
    with pytest.raises(Refused, match=f"{key} means .*; capture takes decoder-only models"):
        read_model({**LLAMA, key: True})


@pytest.mark.parametrize("key", UNTOLD)
def test_shapes_that_are_not_known(key: str) -> None:
    with pytest.raises(Refused, match=f"{key} means .*; `stagetap doctor MODEL --pp N`"):
        read_model({**LLAMA, key: [1]})


def test_keys_of_another_name_are_no_fault_of_the_file() -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 500}
    with pytest.raises(Refused, match=r"model type 'gpt2' tells its sizes; `stagetap doctor"):
        read_model(gpt2)
    falcon = {**LLAMA, "model_type": "falcon", "intermediate_size": None}
    with pytest.raises(Refused, match=r"model type 'falcon' tells its sizes; `stagetap doctor"):
        read_model(falcon)


def test_a_flag_for_every_layer_says_which_are_sparse() -> None:
    model = read_model({**MOE, "moe_layer_freq": [0, 1, 1, 1, 0, 1]})
    assert [type(layer.feed_forward).__name__[0] for layer in model.layers] == list("DEEEDE")
    alike = read_model({**MOE, "moe_layer_freq": [1] * 6})
    assert alike.parameters() == read_model({**MOE, "moe_layer_freq": 1}).parameters()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
_KEYS = sorted(
    {*LLAMA, *MOE, *QWEN3_NEXT, *UNTOLD, *NO_DECODER}
    | {key for _, changes, _ in WRONG for key in changes}
    | set(target("kimi-k3")["text_config"])
    | {"kv_lora_rank", "n_shared_experts", "num_local_experts", "sliding_window", "head_dim"}
)


# No deadline: the first model type that is not checked loads transformers.
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from([LLAMA, MOE, QWEN3_NEXT, target("kimi-k3")["text_config"]]),
    st.dictionaries(st.sampled_from(_KEYS), _VALUES, min_size=1, max_size=3),
)
def test_any_values_make_a_plan_or_a_refusal(base: dict[str, Any], changes: dict[str, Any]) -> None:
    with suppress(Refused):
        make_plan(read_model({**base, **changes}), [0], Parallel(2, 2), sequence_tokens=8)
