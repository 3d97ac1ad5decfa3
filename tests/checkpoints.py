"""Tiny random checkpoints of real architectures, made once a session by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    # Not captured in this version: its decoder layers are none of the known ones.
    "granite": ("GraniteConfig", "GraniteForCausalLM", {}),
}


def tiny_checkpoint(family: str, folder: Path, **sizes: Any) -> Path:
    """Write a random bfloat16 checkpoint of one family to ``folder`` and return it."""
    import torch
    import transformers

    config_name, model_name, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**SIZES, **changes, **sizes})
    model = getattr(transformers, model_name)(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder
