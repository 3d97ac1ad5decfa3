"""Shapes read out of configurations: against published sizes, and by hand on small ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from stagetap.errors import Refused
from stagetap.plan.parallel import Parallel
from stagetap.plan.read_model import read_model
from unit.plan.targets import LLAMA, MOE, target


def elements_by_kind(config: dict[str, Any]) -> Counter[str]:
    """Elements of the whole model by kind of weight."""
    model, alone = read_model(config), Parallel(1, 1)
    found: Counter[str] = Counter()
    weights = model.outer_weights(True, True, alone)
    for index, layer in enumerate(model.layers):
        weights += layer.weights(index, model.hidden_size, alone)
    for weight in weights:
        found[weight.kind] += weight.elements
    return found


def test_kimi_k3_against_what_is_published() -> None:
    """93 layers, 69 KDA and 24 MLA, 896 experts of which 16 run, 2.78T parameters, MXFP4."""
    config = target("kimi-k3")
    model = read_model(config)
    text = config["text_config"]
    assert model.num_hidden_layers == 93
    assert (model.hidden_size, model.vocab_size) == (7168, 163840)
    assert (text["num_experts"], text["num_experts_per_token"]) == (896, 16)
    assert text["attn_res_block_size"] == 12
    kinds = Counter(layer.attention.label for layer in model.layers)
    assert kinds == {"KDA": 69, "MLA": 24}
    # The last two layers are MLA both.
    assert [layer.attention.label for layer in model.layers[-3:]] == ["KDA", "MLA", "MLA"]
    assert 2.775e12 < model.parameters() < 2.785e12
    assert 2.72e12 < elements_by_kind(config)["routed_experts"] < 2.73e12


def test_kimi_k3_weighs_what_its_checkpoint_weighs() -> None:
    """Published: 1.45 TB of routed experts, 17.5 MB each, and 108.81 + 4.70 GB of all else."""
    model, alone = read_model(target("kimi-k3")), Parallel(1, 1)
    weights = model.outer_weights(True, True, alone)
    for index, layer in enumerate(model.layers):
        weights += layer.weights(index, model.hidden_size, alone)
    sizes: Counter[str] = Counter()
    for weight in weights:
        sizes[weight.kind] += model.quantization.bytes_of(weight, model.itemsize)
    experts = sizes.pop("routed_experts")
    assert experts / 1e12 == pytest.approx(1.45, abs=0.005)
    assert experts / (92 * 896) / 1e6 == pytest.approx(17.5, abs=0.05)
    assert sum(sizes.values()) / 1e9 == pytest.approx(108.81 + 4.70, abs=0.05)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # As the hub counts the safetensors files; DeepSeek-V3 without its MTP layer (671B).
        ("deepseek-v3", 671_026_419_200),
        ("qwen3-235b-a22b", 235_093_634_560),
    ],
)
def test_published_parameter_counts(name: str, parameters: int) -> None:
    assert read_model(target(name)).parameters() == parameters


def test_a_dense_model_by_hand() -> None:
    attention = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128
    layer = attention + 3 * 128 * 256 + 2 * 128
    outside = 2 * 500 * 128 + 128
    assert read_model(LLAMA).parameters() == 6 * layer + outside
    tied = read_model({**LLAMA, "tie_word_embeddings": True})
    assert tied.parameters() == 6 * layer + outside - 500 * 128


def test_experts_by_hand() -> None:
    attention = 128 * (4 + 2 + 2) * 32 + 4 * 32 * 128 + 2 * 32
    experts = 8 * 3 * 128 * 64
    layer = attention + experts + 8 * 128 + 2 * 128
    assert read_model(MOE).parameters() == 6 * layer + 2 * 500 * 128 + 128
    assert elements_by_kind(MOE)["routed_experts"] == 6 * experts


@pytest.mark.parametrize(
    ("model_type", "more"),
    [("olmo2", 4 * 32 + 2 * 32), ("olmoe", 4 * 32 + 2 * 32), ("cohere", -128), ("cohere2", -128)],
)
def test_norms_by_hand(model_type: str, more: int) -> None:
    dense = {"num_experts": 0, "tie_word_embeddings": False}
    found = read_model({**LLAMA, **dense, "model_type": model_type}).parameters()
    assert found == read_model(LLAMA).parameters() + 6 * more


def test_which_layers_are_sparse() -> None:
    sparse = {**MOE, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    names = [type(layer.feed_forward).__name__ for layer in read_model(sparse).layers]
    assert names == ["DenseBlock", "DenseBlock"] + ["DenseBlock", "ExpertBlock"] * 2
    first = read_model({**MOE, "first_k_dense_replace": 3})
    assert [type(layer.feed_forward).__name__[0] for layer in first.layers] == list("DDDEEE")


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({}, ["full"] * 6),
        ({"sliding_window": 16, "use_sliding_window": False}, ["full"] * 6),
        # vLLM takes 0 for none, and an absent one for the class's.
        ({"sliding_window": 0, "model_type": "mistral"}, ["full"] * 6),
        ({"sliding_window": None, "model_type": "mistral"}, ["full"] * 6),
        ({"model_type": "mistral"}, ["window 4096"] * 6),
        ({"attn_type_list": [1] * 6}, ["full"] * 6),
        ({"sliding_window": 16, "model_type": "mistral"}, ["window 16"] * 6),
        ({"sliding_window": 16, "model_type": "gpt_oss"}, ["window 16", "full"] * 3),
        (
            {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 3},
            ["window 16", "full"] * 3,
        ),
        (
            {
                "model_type": "qwen3_next",
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 64,
                "linear_conv_kernel_dim": 4,
            },
            ["GDN", "GDN", "GDN", "full", "GDN", "GDN"],
        ),
    ],
)
def test_kinds_of_attention(changes: dict[str, Any], labels: list[str]) -> None:
    model = read_model({**LLAMA, **changes})
    assert [layer.attention.label for layer in model.layers] == labels


def test_what_is_guessed_is_said() -> None:
    assert read_model(LLAMA).remarks == ()
    novel = {"model_type": "novel", "tie_word_embeddings": False}
    unknown = read_model({**LLAMA, **novel, "sliding_window": 16})
    assert "'novel' was read by the keys" in unknown.remarks[0]
    assert "counted as full attention" in unknown.remarks[1]
    biased = read_model({**LLAMA, **novel, "use_bias": True})
    assert "use_bias: biases are not counted, weights are a lower bound" in biased.remarks
    assert "towers" in read_model(target("kimi-k3")).remarks[0]
    assert "MTP" in read_model(target("deepseek-v3")).remarks[0]
    assert "bfloat16" in read_model({**LLAMA, "dtype": "float32"}).remarks[0]
    assert read_model({**LLAMA, "dtype": "float32"}, dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": None}, "says no hidden_size"),
        ({"num_hidden_layers": "6"}, "num_hidden_layers is '6', not a size"),
        ({"intermediate_size": True}, "intermediate_size is True, not a size"),
        ({"head_dim": None, "hidden_size": 130}, "130 does not divide by 4 heads"),
        ({"dtype": "int8"}, "'int8' is none that taps are stored in"),
        ({"layer_types": ["full_attention"] * 5}, "names 5 layers of 6"),
        ({"layer_types": ["chunked_attention"] * 6}, "does not know 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 6}, "no sliding_window"),
        ({"layer_types": ["linear_attention"] * 6}, "linear-attention layers of an unknown kind"),
        ({"index_topk": 2048}, "index_topk means an indexer"),
        ({"mamba_d_state": 64}, "Mamba layers"),
        ({"per_layer_config": {"2": {"head_dim": 64}}}, "sizes that differ by layer"),
        ({"kv_lora_rank": 64}, "says no qk_nope_head_dim"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"moe_num_experts": 64}, "does not know what moe_num_experts means"),
        ({"num_attention_groups": 2}, "does not know what num_attention_groups means"),
        ({"num_dense_layers": 2}, "does not know what num_dense_layers means"),
        ({"shared_intermediate_size": 64}, "does not know what shared_intermediate_size means"),
        ({"layers_block_type": ["attention"]}, "does not know what layers_block_type means"),
        ({"expert_groups": {"a": 1}}, "does not know what expert_groups means"),
        ({"interleave_moe_layer_step": 1}, "blocks of two widths"),
        ({"attn_type_list": [0, 1, 1, 1, 1, 1]}, "layers without softmax attention"),
        ({"moe_intermediate_size": [64, 32], "num_experts": 4}, "lists that differ by layer"),
    ],
)
def test_what_cannot_be_told_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as refused:
        read_model({**LLAMA, **changes})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("model_type", ["starcoder2", "gpt_neox", "phi", "apertus", "nemotron"])
def test_blocks_that_may_have_no_gate_are_refused(model_type: str) -> None:
    """Where the file does not name the activation, its class does."""
    with pytest.raises(Refused, match=f"blocks of '{model_type}' have a gate; `stagetap doctor"):
        read_model({**LLAMA, "model_type": model_type})


def test_what_changes_no_shape_is_no_reason_to_refuse() -> None:
    harmless = {"moe_topk": [2] * 6, "num_expert_group": 8, "moe_aux_loss": 2.5, "use_moe": True}
    novel = {**LLAMA, "model_type": "novel", "tie_word_embeddings": False, "hidden_act": "silu"}
    assert read_model({**novel, **harmless}).parameters() == read_model(novel).parameters()


def test_a_list_that_repeats_one_size_is_that_size() -> None:
    """As Hunyuan-A13B is released, whose shared experts stand under a key of their own."""
    said = {"n_shared_experts": 1, "moe_intermediate_size": 64}
    listed = {"num_shared_expert": [1] * 6, "moe_intermediate_size": [64] * 6}
    assert read_model({**MOE, **listed}).parameters() == read_model({**MOE, **said}).parameters()
