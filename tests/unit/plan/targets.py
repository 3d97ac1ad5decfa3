"""Configurations of the plan's tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}
MOE: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}


def target(name: str) -> dict[str, Any]:
    """A configuration of ``configs/targets``."""
    return json.loads((ROOT / "configs" / "targets" / name / "config.json").read_text())
