"""Multi-head latent attention from a draft block to its target's context and to itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale
from transformers.models.qwen3.modeling_qwen3 import (
    ALL_ATTENTION_FUNCTIONS,
    Qwen3RotaryEmbedding,
    eager_attention_forward,
)

from .config import K3DSparkConfig


class K3DSparkRotaryEmbedding(nn.Module):
    """Angles of the rotary dimensions, in float32 whatever the model's dtype, as vLLM's table is.

    It keeps no buffer: a buffer would be cast with the model, and frequencies in bfloat16 turn the
    keys at position 1000 by whole radians.
    """

    def __init__(self, config: K3DSparkConfig) -> None:
        super().__init__()
        self.config = config
        assert config.rope_parameters is not None  # given by the configuration
        self.frequencies = {
            "default": Qwen3RotaryEmbedding.compute_default_rope_parameters,
            "yarn": ROPE_INIT_FUNCTIONS["yarn"],
        }[config.rope_parameters["rope_type"]]

    def forward(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines, ``[B, T, R / 2]`` each, of positions ``[B, T]``; ``like``'s device."""
        inverse, magnitude = self.frequencies(self.config, device=like.device)  # [R / 2]
        angles = position_ids[..., None].to(like.device, torch.float32) * inverse.to(like.device)
        return angles.cos() * magnitude, angles.sin() * magnitude


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the neighbouring pairs (0, 1), (2, 3), ... of the last dimension.

    Args:
        x: ``[B, heads, T, R]``. Turned in float32 at least, and given back in its own dtype.
        cos: ``[B, T, R / 2]``, as ``sin``.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    even, odd = wide[..., 0::2], wide[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B, 1, T, R / 2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


class K3DSparkMLAAttention(nn.Module):
    """Queries from the draft block; keys and values from context and block, with the same weights.

    The context enters as ``context_norm(context_proj(taps))``, without a layer's own norm, which is
    how vLLM fills the draft's cache. Only the rotary dimensions of queries and keys are turned,
    each side by its own positions; values never.
    """

    def __init__(self, config: K3DSparkConfig, layer_idx: int) -> None:
        super().__init__()
        assert config.q_lora_rank is not None  # refused by the configuration
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.nope_dim = config.qk_nope_head_dim
        self.rope_dim = config.qk_rope_head_dim
        self.v_head_dim = config.v_head_dim
        self.kv_lora_rank = config.kv_lora_rank
        qk_head_dim = self.nope_dim + self.rope_dim
        # The softmax's scale carries YaRN's mscale squared; the angles carry none.
        self.scaling = yarn_apply_mscale(config.rope_parameters, qk_head_dim**-0.5)
        # What transformers' attention functions ask a module for.
        self.num_key_value_groups = 1
        self.is_causal = False

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.q_a_proj = linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=config.rms_norm_eps)
        self.q_b_proj = linear(config.q_lora_rank, self.num_heads * qk_head_dim)
        self.kv_a_proj_with_mqa = linear(config.hidden_size, self.kv_lora_rank + self.rope_dim)
        self.kv_a_layernorm = nn.RMSNorm(self.kv_lora_rank, eps=config.rms_norm_eps)
        self.kv_b_proj = linear(
            self.kv_lora_rank, self.num_heads * (self.nope_dim + self.v_head_dim)
        )
        self.o_proj = linear(self.num_heads * self.v_head_dim, config.hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        target_hidden: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``Q`` draft tokens to ``C`` context tokens and to the draft tokens.

        Args:
            hidden_states: draft tokens ``[B, Q, H]``.
            target_hidden: context ``[B, C, H]``.
            position_embeddings: cosines and sines ``[B, C + Q, R / 2]``, the context's first.
            attention_mask: who sees whom over ``[Q, C + Q]``, in the form of the attention
                implementation that the configuration names.

        Returns:
            ``[B, Q, H]``, and the weights where that implementation gives them.
        """
        batch, queries = hidden_states.shape[:2]
        cos, sin = position_embeddings

        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        q = q.view(batch, queries, self.num_heads, -1).transpose(1, 2)  # [B, heads, Q, nope + R]
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        q_rope = rotate_pairs(q_rope, cos[:, -queries:], sin[:, -queries:])

        both = torch.cat((target_hidden, hidden_states), dim=1)  # [B, C + Q, H]
        latent, k_rope = self.kv_a_proj_with_mqa(both).split(
            [self.kv_lora_rank, self.rope_dim], dim=-1
        )
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, both.shape[1], self.num_heads, -1).transpose(1, 2)
        k_nope, v = kv.split([self.nope_dim, self.v_head_dim], dim=-1)
        k_rope = rotate_pairs(k_rope.unsqueeze(1), cos, sin)  # one for all heads

        attend = (
            eager_attention_forward
            if self.config._attn_implementation == "eager"
            else ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        )
        output, weights = attend(
            self,
            torch.cat((q_nope, q_rope), dim=-1),
            torch.cat((k_nope, k_rope.expand(-1, self.num_heads, -1, -1)), dim=-1),
            v,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, queries, -1)), weights
