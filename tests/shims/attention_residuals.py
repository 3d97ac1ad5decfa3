"""Block attention residuals in torch: what Kimi-K3's kernel computes."""

from __future__ import annotations

import torch
from torch import Tensor


def attn_res(
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Tensor,
    norm_weight: Tensor,
    qk_weight: Tensor,
    output_norm_weight: Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
) -> Tensor:
    """Mix blocks ``[T, blocks, H]`` and prefix ``[T, H]``, which ``delta`` is added to in place."""
    if delta is not None:
        prefix += delta
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    sources = torch.cat([blocks[:, :num_blocks], prefix[:, None]], 1).float()
    scores = (sources * (norm_weight.float() * qk_weight.float())).sum(-1)
    scores = scores * torch.rsqrt(sources.pow(2).mean(-1) + eps)
    mixed = (scores.softmax(-1)[..., None] * sources).sum(1)
    if output_norm_weight is not None:
        mixed = mixed * torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + output_norm_eps)
        mixed = mixed * output_norm_weight.float()
    return mixed.to(prefix.dtype)
