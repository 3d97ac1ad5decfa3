"""What of a configuration the plan cannot tell the shapes of, and therefore refuses."""

from __future__ import annotations

import re

from stagetap.config_values import ConfigValues
from stagetap.errors import Refused
from stagetap.wording import shortened, shown

DOCTOR_KNOWS = (
    "`stagetap doctor MODEL --pp N`, which needs no more than this file, says whether it can be "
    "captured"
)

UNTOLD = {
    "compress_ratios": "compressed attention",
    "index_topk": "an indexer for sparse attention",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "state_size": "Mamba layers",
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that share a KV cache",
    "global_head_dim": "heads of two sizes",
    "per_layer_config": "sizes that differ by layer",
    "use_double_wide_mlp": "blocks of two widths",
    "cross_attention_layers": "layers that attend to images",
    "hybrid_override_pattern": "layers of several kinds",
    "interleave_moe_layer_step": "blocks of two widths among layers with experts",
}
"""Keys that, set, mean shapes which the plan cannot tell, and what they stand for."""

NO_DECODER = {
    "is_encoder_decoder": "an encoder beside its decoder",
    "type_vocab_size": "an encoder, whose tokens are of several segments",
    "classifier_pooling": "an encoder, whose states are pooled",
}
"""Keys that, set, mean a model whose prompts do not run through a decoder alone."""

_PARTS = re.compile(
    r"expert|moe|dense_layer|^share|mlp_layer_types"
    r"|attention_groups|attn_type|attention_type|block_type|layer_pattern"
)
"""Keys that name experts, blocks shared among tokens, or kinds of attention and layers."""

_READ_PARTS = frozenset(
    {
        "attn_type_list",
        "decoder_sparse_step",
        "min_moe_intermediate_per_partition",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts",
        "num_local_experts",
        "num_shared_expert",
        "num_shared_experts",
        "routed_expert_hidden_size",
        "shared_expert_intermediate_size",
        # How many of them a token takes, which changes no shape.
        "moe_k",
        "moe_top_k",
        "moe_topk",
        "num_expert_group",
        "num_experts_per_tok",
        "num_experts_per_token",
    }
)
"""Those of them that the plan reads, or need not."""

_GATED_WITHOUT_SILU = {"gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma"}


def check_kind(values: ConfigValues) -> None:
    for key, what in NO_DECODER.items():
        if values.has(key):
            raise Refused(f"{values.where}: {key} means {what}; capture takes decoder-only models")
    for key, what in UNTOLD.items():
        if values.has(key):
            raise Refused(
                f"{values.where}: {key} means {what}, whose shapes the plan does not know yet; "
                f"{DOCTOR_KNOWS}"
            )


def check_parts(values: ConfigValues) -> None:
    """Refuse experts and kinds of attention whose keys the plan does not read."""
    for key in values.shapes():
        if _PARTS.search(key.lower()) and key not in _READ_PARTS:
            raise Refused(
                f"{values.where}, or the class of its model type: the plan does not know what "
                f"{shortened(key)} means for the shapes of layers; {DOCTOR_KNOWS}"
            )
    if any(kind != 1 for kind in values.integers("attn_type_list") or ()):
        raise Refused(
            f"{values.where}: attn_type_list means layers without softmax attention, whose shapes "
            f"the plan does not know yet; {DOCTOR_KNOWS}"
        )


def check_gate(values: ConfigValues, model_type: str) -> None:
    """Refuse what may be a feed-forward block of two matrices: nearly all of three use SiLU."""
    for key in ("hidden_activation", "hidden_act"):
        activation = values.text(key)
        if activation in (None, "silu", "swish"):
            continue
        if model_type not in _GATED_WITHOUT_SILU:
            raise Refused(
                f"{values.where}: {key} {shown(activation)}: the plan does not know whether the "
                f"feed-forward blocks of {shown(model_type or 'unnamed')} have a gate; "
                f"{DOCTOR_KNOWS}"
            )
