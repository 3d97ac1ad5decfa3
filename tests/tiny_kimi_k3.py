"""A tiny random Kimi-K3 text model: transformers has none, so its tensors are named here.

Eight layers of KDA and MLA with latent experts and block attention residuals, as vLLM loads them.
The MLA's sizes are those that vLLM's CPU build has kernels for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = 8
MLA_LAYERS = (4, 8)  # counted from 1, as the configuration does

CONFIG: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "vocab_size": 512,
    "hidden_size": 128,
    "head_dim": 32,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "activation_situ_beta": 1.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "linear_attn_config": {
        "kda_layers": [i for i in range(1, LAYERS + 1) if i not in MLA_LAYERS],
        "full_attn_layers": list(MLA_LAYERS),
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
    },
    "attn_res_block_size": 3,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}


def write_kimi_k3(folder: Path) -> Path:
    """Write the checkpoint to ``folder``, the same on every machine, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), "utf-8")
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in tensor_shapes():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1 and name.endswith("norm.weight"):
            tensors[name] = (1 + 0.2 * noise).to(torch.bfloat16)
        elif name.endswith(("A_log", "dt_bias", "correction_bias")):
            tensors[name] = 0.3 * noise
        elif name.endswith("conv1d.weight"):
            tensors[name] = 0.4 * noise
        elif name.endswith("embed_tokens.weight"):
            tensors[name] = noise.to(torch.bfloat16)
        else:
            tensors[name] = (noise * 1.5 / shape[-1] ** 0.5).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensor_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint."""
    hidden, vocabulary = CONFIG["hidden_size"], CONFIG["vocab_size"]
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (hidden,)
        for residual in ("self_attention_res", "mlp_res"):
            yield f"{prefix}.{residual}_norm.weight", (hidden,)
            yield f"{prefix}.{residual}_proj.weight", (1, hidden)
        attention = _mla if layer + 1 in MLA_LAYERS else _kda
        for name, shape in attention():
            yield f"{prefix}.self_attn.{name}", shape
        if layer < CONFIG["first_k_dense_replace"]:
            yield from _mlp(f"{prefix}.mlp", CONFIG["intermediate_size"])
        else:
            yield from _experts(f"{prefix}.block_sparse_moe")
    yield "model.output_attn_res_norm.weight", (hidden,)
    yield "model.output_attn_res_proj.weight", (1, hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _kda() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, linear = CONFIG["hidden_size"], CONFIG["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    width = heads * dim
    for which in "qkv":
        yield f"{which}_proj.weight", (width, hidden)
        yield f"{which}_conv1d.weight", (width, 1, linear["short_conv_kernel_size"])
    yield "b_proj.weight", (heads, hidden)
    yield "f_a_proj.weight", (dim, hidden)
    yield "f_b_proj.weight", (width, dim)
    yield "g_proj.weight", (width, hidden)
    yield "dt_bias", (width,)
    yield "A_log", (heads,)
    yield "o_norm.weight", (dim,)
    yield "o_proj.weight", (hidden, width)


def _mla() -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, rank = (
        CONFIG[name] for name in ("hidden_size", "num_attention_heads", "kv_lora_rank")
    )
    nope, rope, value, low = (
        CONFIG[name]
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    )
    yield "q_a_proj.weight", (low, hidden)
    yield "q_a_layernorm.weight", (low,)
    yield "q_b_proj.weight", (heads * (nope + rope), low)
    yield "kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield "kv_a_layernorm.weight", (rank,)
    yield "kv_b_proj.weight", (heads * (nope + value), rank)
    yield "g_proj.weight", (heads * value, hidden)
    yield "o_proj.weight", (hidden, heads * value)


def _mlp(prefix: str, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = CONFIG["hidden_size"]
    yield f"{prefix}.gate_proj.weight", (inner, hidden)
    yield f"{prefix}.up_proj.weight", (inner, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, inner)


def _experts(prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, experts = CONFIG["hidden_size"], CONFIG["num_experts"]
    latent, inner = CONFIG["routed_expert_hidden_size"], CONFIG["moe_intermediate_size"]
    yield f"{prefix}.gate.weight", (experts, hidden)
    yield f"{prefix}.gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield f"{prefix}.experts.{expert}.w1.weight", (inner, latent)
        yield f"{prefix}.experts.{expert}.w3.weight", (inner, latent)
        yield f"{prefix}.experts.{expert}.w2.weight", (latent, inner)
    yield from _mlp(f"{prefix}.shared_experts", inner)
    yield f"{prefix}.routed_expert_down_proj.weight", (latent, hidden)
    yield f"{prefix}.routed_expert_up_proj.weight", (hidden, latent)
    yield f"{prefix}.routed_expert_norm.weight", (latent,)
