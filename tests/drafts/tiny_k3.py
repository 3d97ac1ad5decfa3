"""A K3 draft small enough for plain loops, and the target that it belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stagetap.drafts.k3_dspark import K3DSparkConfig, K3DSparkModel, K3DSparkSpeculatorConfig

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 32768,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 10,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1 << 20,
    "target_layer_ids": [2, 0],
    "block_size": 3,
    "mask_token_id": 63,
    "markov_rank": 5,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}

PUBLISHED: dict[str, Any] = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 1 << 20,
    "rope_parameters": {**YARN, "rope_theta": 50000.0},
    "target_layer_ids": [2, 23, 47, 71, 89],
    "block_size": 7,
    "mask_token_id": 163837,
    "markov_rank": 256,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
"""Inferact/Kimi-K3-DSpark: what its config.json says of shapes and heads."""


def draft_config(**changes: Any) -> K3DSparkConfig:
    """A tiny configuration with changes."""
    config = K3DSparkConfig(**{**TINY, **changes})
    config._attn_implementation = "sdpa"
    return config


def draft(seed: int = 0, **changes: Any) -> K3DSparkModel:
    """A tiny draft in which every weight matters, its target's parts included."""
    model = K3DSparkModel(K3DSparkSpeculatorConfig.of_draft(draft_config(**changes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(noise * 0.2 + (0 if name.endswith("bias") else 1))
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
        model.lm_head.weight.copy_(model.verifier_lm_head.weight)
    return model


def write_target(folder: Path, hidden_size: int = 16, vocab_size: int = 64) -> Path:
    """A tiny Llama, whose embedding, head and norm a draft takes over."""
    from checkpoints import tiny_checkpoint

    return tiny_checkpoint(
        "llama",
        folder,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
