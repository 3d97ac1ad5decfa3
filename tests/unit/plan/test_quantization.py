"""Bits of a weight, by every method, from the shapes that checkpoints really hold."""

from __future__ import annotations

from typing import Any

import pytest

from stagetap.config_values import ConfigValues
from stagetap.errors import Refused
from stagetap.plan.quantization import Quantization
from stagetap.plan.quantization import read_quantization as read_values
from stagetap.plan.weights import Weight

BF16 = 2


def read_quantization(config: dict[str, Any] | None) -> Quantization:
    """As it stands in a config.json."""
    values = ConfigValues({"quantization_config": config})
    return read_values(values.section("quantization_config"))


def expert(rows: int, columns: int, copies: int = 1) -> Weight:
    name = "model.layers.3.mlp.experts.0.up_proj"
    return Weight(name, "routed_experts", rows, columns, rows * columns, copies)


def linear(name: str, rows: int = 256, columns: int = 256) -> Weight:
    return Weight(f"model.layers.3.{name}", "sharded", rows, columns, rows * columns)


def compressed(ignore: tuple[str, ...] = (), **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors with one group for all linear layers."""
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": list(ignore),
    }


@pytest.mark.parametrize("nothing", [None, {}])
def test_unquantized(nothing: Any) -> None:
    quantization = read_quantization(nothing)
    assert quantization.method == "none"
    assert quantization.bytes_of(expert(4, 8, copies=3), BF16) == 3 * 4 * 8 * 2


@pytest.mark.parametrize(
    ("config", "weight", "size"),
    [
        # A float32 scale for every block of 128 x 128, begun ones included.
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            expert(256, 384, copies=2),
            2 * (256 * 384 + 2 * 3 * 4),
        ),
        ({"quant_method": "fp8"}, linear("mlp.up_proj"), 256 * 256 + 4),
        # Kimi-K3's w1: packed [3072, 1792], scales [3072, 112].
        (
            compressed(num_bits=4, type="float", strategy="group", group_size=32),
            expert(3072, 3584),
            3072 * 1792 + 3072 * 112,
        ),
        ({"quant_method": "mxfp4"}, expert(64, 64), 64 * 32 + 64 * 2),
        # NVFP4: an 8-bit scale every 16.
        (
            compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16),
            linear("mlp.up_proj"),
            256 * 128 + 256 * 16,
        ),
        # W4A16 with a 16-bit scale every 128, and with zero points of 4 bits.
        (
            compressed(num_bits=4, type="int", strategy="group", group_size=128),
            linear("mlp.up_proj"),
            256 * 128 + 256 * 2 * 2,
        ),
        (
            compressed(num_bits=4, type="int", strategy="group", group_size=128, symmetric=False),
            linear("mlp.up_proj"),
            256 * 128 + 256 * 2 * 20 // 8,
        ),
        (
            compressed(num_bits=8, type="float", strategy="channel"),
            linear("mlp.up_proj"),
            256 * 256 + 256 * 4,
        ),
        (compressed(num_bits=8, type="float", strategy="tensor"), linear("x"), 256 * 256 + 4),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            linear("mlp.up_proj"),
            256 * 128 + 256 * 2 * 20 // 8,
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1},
            linear("mlp.up_proj"),
            256 * 256 + 256 * 3,
        ),
    ],
)
def test_bytes_by_method(config: dict[str, Any], weight: Weight, size: int) -> None:
    assert read_quantization(config).bytes_of(weight, BF16) == size


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (compressed(("re:.*self_attn.*",), num_bits=8, strategy="channel"), "self_attn.q_proj"),
        (
            compressed(("model.layers.3.mlp.up_proj",), num_bits=8, strategy="channel"),
            "mlp.up_proj",
        ),
        (
            compressed(
                ("language_model.model.layers.3.mlp.up_proj",), num_bits=8, strategy="channel"
            ),
            "mlp.up_proj",
        ),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.3.mlp"]}, "mlp.up_proj"),
        ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}, "self_attn.q_proj"),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["mlp"]},
            "mlp.up_proj",
        ),
        ({"quant_method": "mxfp4"}, "mlp.up_proj"),  # no expert
    ],
)
def test_what_is_left_in_the_models_dtype(config: dict[str, Any], name: str) -> None:
    quantization = read_quantization(config)
    assert quantization.bytes_of(linear(name), BF16) == 256 * 256 * BF16
    if config["quant_method"] != "mxfp4":
        assert quantization.bytes_of(linear("other.k_proj"), BF16) < 256 * 256 * BF16


def test_norms_and_routers_are_never_quantized() -> None:
    quantization = read_quantization({"quant_method": "fp8"})
    router = Weight("model.layers.0.mlp.gate", "replicated", 8, 128, 1024, linear=False)
    assert quantization.bytes_of(router, BF16) == 2048
    state = Weight("model.layers.0.A_log", "sharded", 8, 1, 8, linear=False, itemsize=4)
    assert quantization.bytes_of(state, BF16) == 32


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "does not know the bits of 'bitsandbytes'; known are awq",
        ),
        ({"bits": 4}, "no method"),
        ({"quant_method": "awq", "group_size": 128}, "says no bits or w_bit"),
        ({"quant_method": "compressed-tensors"}, "without config_groups"),
        (compressed(num_bits=4, strategy="spiral"), "strategy 'spiral'"),
    ],
)
def test_what_is_unknown_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused) as refused:
        read_quantization(config)
    assert said in str(refused.value)
