"""What a model type's configuration class holds where a ``config.json`` is silent.

Released configurations leave keys to their class, and classes differ: the output head is the
embedding by default in Gemma, and not in Llama. vLLM reads configurations through these classes.
Those of the checked types stand here, so that a plan of them needs no package and says the same
everywhere; those of any other type are asked of transformers, where it is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stagetap.config_values import ConfigValues, decoder_values

IDENTITY = frozenset({"hidden_size", "intermediate_size", "num_hidden_layers"})
"""Sizes that say which model it is: a file without them is broken, not terse."""

TOLD = (
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "n_shared_experts",
    "num_shared_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
"""Sizes that the plan says it took from a class; a window shows in its table."""

_UNTOLD = (
    "sliding_window",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "use_sliding_window",
)
READ = (*TOLD, *_UNTOLD)
"""Keys whose defaults of the checked types stand here."""


@dataclass(frozen=True)
class ClassDefaults:
    """A configuration class.

    Attributes:
        values: by key, what its instances hold unless told otherwise.
        aliases: other names that it takes, with the key that each stands for.
        decoder: model type of its ``text_config``, None where it has none.
    """

    values: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)
    decoder: str | None = None

    def missing_in(self, said: Iterable[str]) -> dict[str, Any]:
        """The defaults of keys that are said by none of their names; null is said."""
        there = {self.aliases.get(name, name) for name in said}
        return {
            name: value
            for name, value in self.values.items()
            if value is not None
            and name not in IDENTITY
            and self.aliases.get(name, name) not in there
        }


_LLAMA = {
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_MISTRAL = {
    "vocab_size": 32000,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
_QWEN = {
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}

CHECKED: dict[str, ClassDefaults] = {
    "deepseek_v3": ClassDefaults(
        {
            "vocab_size": 129280,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "tie_word_embeddings": False,
            "attention_bias": False,
        },
        {"num_local_experts": "n_routed_experts"},
    ),
    "gemma3": ClassDefaults({"tie_word_embeddings": True}, decoder="gemma3_text"),
    "gemma3_text": ClassDefaults(
        {
            "vocab_size": 262208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            "tie_word_embeddings": True,
            "attention_bias": False,
        }
    ),
    "glm4": ClassDefaults(
        {
            "vocab_size": 151552,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
            "attention_bias": True,
        }
    ),
    "gpt_oss": ClassDefaults(
        {
            "vocab_size": 201088,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "sliding_window": 128,
            "num_local_experts": 128,
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
        {"num_experts": "num_local_experts"},
    ),
    "granite": ClassDefaults(_LLAMA),
    # vLLM's own class, under which sizes are never left out.
    "kimi_k3": ClassDefaults({"tie_word_embeddings": False}, decoder="kimi_linear"),
    "kimi_linear": ClassDefaults({"tie_word_embeddings": False}),
    "llama": ClassDefaults(_LLAMA),
    "mistral": ClassDefaults({**_MISTRAL, "sliding_window": 4096}),
    "mixtral": ClassDefaults(
        {**_MISTRAL, "num_local_experts": 8}, {"num_experts": "num_local_experts"}
    ),
    "qwen2": ClassDefaults(_QWEN),
    "qwen2_moe": ClassDefaults(
        {
            **_QWEN,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        }
    ),
    "qwen3": ClassDefaults({**_QWEN, "head_dim": 128, "attention_bias": False}),
    "qwen3_moe": ClassDefaults(
        {
            **_QWEN,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "moe_intermediate_size": 768,
            "attention_bias": False,
        },
        {"num_experts": "num_local_experts"},
    ),
    "qwen3_next": ClassDefaults(
        {
            "vocab_size": 151936,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32768,
            "num_experts": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": False,
            "attention_bias": False,
        }
    ),
}
"""The classes of transformers 5.19, which ``tests/unit/plan/test_defaults.py`` compares."""


def class_defaults(model_type: str) -> ClassDefaults | None:
    """The configuration class of a model type; None where nobody here knows it."""
    return CHECKED.get(model_type) or class_of_transformers(model_type)


def class_of_transformers(model_type: str) -> ClassDefaults | None:
    """The same, out of the transformers that is installed; None without one that loads."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        found = CONFIG_MAPPING[model_type]
    except (ImportError, KeyError, OSError, RuntimeError):
        return None
    values = {
        each.name: each.default
        for each in dataclasses.fields(found)
        if each.default is not dataclasses.MISSING
    }
    decoder = getattr(found.sub_configs.get("text_config"), "model_type", None)
    return ClassDefaults(values, dict(found.attribute_map), decoder or None)


@dataclass(frozen=True)
class Completed:
    """A configuration with what its classes add.

    Attributes:
        outer: the whole of it.
        decoder: the values of its decoder.
        model_type: of the decoder.
        taken: sizes of the decoder that its class gave.
    """

    outer: ConfigValues
    decoder: ConfigValues
    model_type: str
    taken: Mapping[str, int]


def completed(config: Mapping[str, Any], where: str) -> Completed:
    """A configuration as vLLM reads it: with the defaults of its classes.

    Raises:
        Refused: it, its ``text_config`` or a model type is of the wrong type.
    """
    outer, decoder = ConfigValues(config, where), decoder_values(config, where)
    outer_type = outer.text("model_type") or ""
    outer_class = class_defaults(outer_type)
    # A decoder may stand in text_config without a type, or lie flat in an older file.
    inner_type = outer_class.decoder if outer_class else None
    said_type = decoder.text("model_type") if outer.has("text_config") else None
    model_type = said_type or inner_type or outer_type
    decoder_class = outer_class if model_type == outer_type else class_defaults(model_type)
    added = _added(decoder, decoder_class)
    return Completed(
        outer.completed_by(_added(outer, outer_class)),
        decoder.completed_by(added),
        model_type,
        {name: added[name] for name in TOLD if name in added},
    )


def _added(values: ConfigValues, found: ClassDefaults | None) -> dict[str, Any]:
    return {} if found is None else found.missing_in(values.names)
