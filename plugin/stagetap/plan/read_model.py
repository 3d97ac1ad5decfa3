"""Reads a model's configuration as a list of decoder layers, whose shapes can be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagetap.config_values import (
    MAX_LAYERS,
    ConfigValues,
    MissingSize,
    asked_dtype,
    positions_are_scaled,
    said_dtype,
)
from stagetap.errors import Refused
from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.plan.defaults import Completed, completed
from stagetap.plan.model import DecoderLayer, Model
from stagetap.plan.quantization import read_quantization
from stagetap.plan.read_layers import attentions, feed_forward
from stagetap.plan.untold import DOCTOR_KNOWS, check_gate, check_kind, check_parts
from stagetap.wording import shown

CHECKED_TYPES = frozenset(
    {
        "deepseek_v3",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "granite",
        "kimi_k3",
        "kimi_linear",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
    }
)

_BIASES = ("use_bias", "bias", "use_qkv_bias", "add_bias_linear")
"""Keys of models that were not read, under which their linear layers have biases."""

_ENDS = frozenset({"embedding", "head", "norm"})
_ENDS_EVERYWHERE = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"), _ENDS
    ),
    "qwen3_next": frozenset({"embedding", "head"}),
}
"""What vLLM 0.32.0 allocates on every stage for these models, and not on the one that uses it."""

_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe_lite"}
_ONE_NORM = {"cohere", "cohere2"}


def read_model(
    config: Mapping[str, Any], where: str = "config.json", dtype: str | None = None
) -> Model:
    """Read a configuration.

    Args:
        config: what ``config.json`` holds.
        where: what to call it in a message.
        dtype: as vLLM's ``--dtype``; None and ``auto`` are the checkpoint's.

    Raises:
        Refused: a size is missing, or the model has parts whose shapes the plan cannot tell.
    """
    ConfigValues(config, where).texts("architectures")  # for what it refuses
    found = completed(config, where)
    model_type = found.model_type
    check_kind(found.decoder)
    check_parts(found.decoder)
    if model_type not in CHECKED_TYPES:
        check_gate(found.decoder, model_type)
    try:
        return _read(found, dtype)
    except MissingSize as error:
        if model_type in CHECKED_TYPES:
            raise
        raise Refused(
            f"{error.missing}: the plan does not know by which keys model type "
            f"{shown(model_type or 'unnamed')} tells its sizes; {DOCTOR_KNOWS}"
        ) from None


def _read(found: Completed, dtype: str | None) -> Model:
    outer, values, model_type = found.outer, found.decoder, found.model_type
    remarks: list[str] = []
    if model_type not in CHECKED_TYPES:
        remarks.append(
            f"model type {shown(model_type or 'unnamed')} was read by the keys that other models "
            "use"
        )
        remarks += [
            f"{key}: biases are not counted, weights are a lower bound"
            for key in _BIASES
            if values.has(key)
        ]
    if found.taken:
        sizes = ", ".join(f"{name} {value}" for name, value in found.taken.items())
        remarks.append(f"config.json leaves to its model type's defaults: {sizes}")
    if outer.has("vision_config") or outer.has("audio_config"):
        remarks.append("towers for images or sound are not counted")
    if values.has("num_nextn_predict_layers"):
        remarks.append("layers that predict further tokens (MTP) are not counted; vLLM loads none")
    total = values.size("num_hidden_layers", most=MAX_LAYERS)
    quantization = read_quantization(
        values.section("quantization_config") or outer.section("quantization_config")
    )
    attention = attentions(values, model_type, total, remarks)
    residuals = values.optional_size("attn_res_block_size") is not None
    layers = tuple(
        DecoderLayer(
            attention[index],
            feed_forward(values, model_type, index),
            norms=_norms(model_type) + 2 * residuals,
            residual_gates=2 * residuals,
        )
        for index in range(total)
    )
    return Model(
        model_type=model_type,
        hidden_size=values.size("hidden_size"),
        vocab_size=values.size("vocab_size"),
        tied=_tied(outer, values, model_type),
        dtype=_dtype(values, outer, dtype, remarks),
        max_len=values.optional_size("max_position_embeddings", "model_max_length"),
        may_be_longer=positions_are_scaled(values),
        layers=layers,
        end_vectors=3 if residuals else 1,
        attention_residuals=residuals,
        ends_everywhere=_ENDS_EVERYWHERE.get(model_type, frozenset()),
        quantization=quantization,
        remarks=tuple(remarks),
    )


def _norms(model_type: str) -> int:
    """Norms of a decoder layer, those within its attention left out."""
    return 4 if model_type in _FOUR_NORMS else 1 if model_type in _ONE_NORM else 2


def _tied(outer: ConfigValues, values: ConfigValues, model_type: str) -> bool:
    """Whether the head is the embedding. vLLM asks what surrounds a decoder first."""
    for each in (outer, values):
        if each.says("tie_word_embeddings"):
            return each.flag("tie_word_embeddings")
    raise Refused(
        f"{values.where} says no tie_word_embeddings, and the default of model type "
        f"{shown(model_type or 'unnamed')} is not known here; write true or false there, "
        "or install a transformers that knows the type"
    )


def _dtype(values: ConfigValues, outer: ConfigValues, asked: str | None, remarks: list[str]) -> str:
    said = asked_dtype(asked)
    found = said or said_dtype(values, outer)
    if said is None and found in (None, "float32"):
        remarks.append(f"dtype {found or 'unsaid'}: vLLM's auto makes it bfloat16")
        return "bfloat16"
    if found not in DTYPE_ITEMSIZE:
        raise Refused(
            f"dtype {shown(found)} is none that taps are stored in; use one of "
            f"{', '.join(DTYPE_ITEMSIZE)}"
        )
    return str(found)
