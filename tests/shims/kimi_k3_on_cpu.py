"""Kimi-K3's NVIDIA variant on vLLM's CPU build: torch in place of the kernels that need a GPU.

Prefill alone, without a quantized cache and without speculation. What is captured, and vLLM's code
between the kernels, stays as it is.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from attention_residuals import attn_res
from torch import Tensor
from torch.nn import functional


def register() -> None:
    from vllm.model_executor.layers import utils
    from vllm.models.kimi_k3.nvidia import kda, mla, model
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda as kda_ops
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    # The interpreter truncates to bfloat16 where the kernel rounds, and takes seconds a layer.
    model.attn_res = attn_res
    # CUDA kernels, or Triton that the interpreter does not run.
    mla.fused_mla_key_concat_kv_cache_insert = key_concat
    mla.fused_mla_decode_q_concat_kv_cache_insert = query_concat
    kda.gather_initial_states = gather_initial_states
    kda_ops.chunk_kda_with_fused_gate = chunk_kda
    # K3's attention reads its weights itself; the CPU build packs them away after loading.
    pack = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: pack(layer, False)
    # With KDA the pages have to be as large as its state: any multiple of 16 tokens works.
    CPUMLABackend.supports_block_size = classmethod(lambda _, size: not size or size % 16 == 0)


def key_concat(
    q: Tensor,
    k_nope: Tensor,
    k_pe: Tensor,
    kv_c: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
) -> Tensor:
    """Keys ``[T, heads, nope + rope]``, and their latents ``[T, rank + rope]`` into the cache."""
    assert cos_sin_cache is None, "the target's MLA has no rotation"
    insert(kv_cache, slot_mapping, kv_c, k_pe)
    k_pe = k_pe.reshape(k_pe.shape[0], 1, -1)
    return torch.cat([k_nope, k_pe.expand(-1, k_nope.shape[1], -1)], -1)


def query_concat(
    ql_nope: Tensor,
    q_pe: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor | None = None,
    cos_sin_cache: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The same for a step of one token, such as a prompt of one, which attends to latents."""
    assert cos_sin_cache is None, "the target's MLA has no rotation"
    insert(kv_cache, slot_mapping, kv_c, k_pe)
    return torch.cat([ql_nope, q_pe], -1)


def insert(kv_cache: Tensor, slot_mapping: Tensor, kv_c: Tensor, k_pe: Tensor) -> None:
    """Latents ``[T, rank]`` and ``[T, rope]`` into their pages, once there are any."""
    if kv_cache.numel():
        pages = kv_cache.view(-1, kv_cache.shape[-1])
        slots = slot_mapping.flatten().long()
        entries = torch.cat([kv_c, k_pe.reshape(k_pe.shape[0], -1)], -1)
        pages[slots[slots >= 0]] = entries[slots >= 0].to(pages.dtype)


def gather_initial_states(state: Tensor, indices: Tensor, has_initial: Tensor) -> Tensor:
    """States ``[requests, ...]``, zero for a request that begins."""
    gathered = state[indices.long()].clone()
    gathered[~has_initial.bool()] = 0
    return gathered


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention token by token, in float32.

    Args:
        q: ``[1, T, heads, K]``, as k and raw_g; v is ``[1, T, heads, V]``.
        raw_beta: ``[1, T, heads]``.
        cu_seqlens: where each request begins, and T.

    Returns:
        ``[1, T, heads, V]``, and ``[requests, heads, V, K]``, each request's state at its end.
    """
    assert cu_seqlens is not None
    _, tokens, heads, width = k.shape
    queries, keys, values = (x[0].float() for x in (q, k, v))
    if use_qk_l2norm_in_kernel:
        queries, keys = (
            x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (queries, keys)
        )
    queries = queries * (scale or width**-0.5)
    gate = raw_g[0].float()
    if g_bias is not None:
        gate = gate + g_bias.view(heads, width)
    rate = A_log.float().view(-1, 1).exp()
    if lower_bound is None:
        gate = -rate * functional.softplus(gate)
    else:
        gate = lower_bound * torch.sigmoid(rate * gate)
    decay, beta = gate.exp(), raw_beta[0].float().sigmoid()
    outputs = torch.zeros(tokens, heads, v.shape[-1])
    ends, states = cu_seqlens.tolist(), []
    for request, (start, end) in enumerate(pairwise(ends)):
        state = torch.zeros(heads, v.shape[-1], width)
        if initial_state is not None:
            state = initial_state[request].float().clone()
        for t in range(start, end):
            state = state * decay[t][:, None, :]
            delta = values[t] - (state * keys[t][:, None, :]).sum(-1)
            state = state + (delta * beta[t][:, None])[:, :, None] * keys[t][:, None, :]
            outputs[t] = (state * queries[t][:, None, :]).sum(-1)
        states.append(state)
    result = outputs[None].to(v.dtype)
    if out is not None:
        result = out.copy_(result)
    return result, torch.stack(states)
