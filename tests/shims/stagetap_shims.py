"""A vLLM plugin for tests: what some models of the matrix need beyond vLLM's CPU build.

Tests put this folder on PYTHONPATH, so vLLM loads it in each of its processes; the variable
STAGETAP_SHIMS names what an engine needs, between commas. No shim touches StageTap or what it
captures, and each says why it is needed.
"""

from __future__ import annotations

import os
from typing import Any

SHIMS_ENV = "STAGETAP_SHIMS"


def register() -> None:
    """The plugin's entry point."""
    for name in filter(None, os.environ.get(SHIMS_ENV, "").split(",")):
        _SHIMS[name]()


def _still_images() -> None:
    """Qwen-VL models without torchvision."""
    import still_images

    still_images.register()


def _native_position_interpolation() -> None:
    """Qwen3-VL interpolates positions in a Triton kernel; the CPU's interpreter makes it NaN."""
    from vllm.model_executor.models import qwen3_vl

    qwen3_vl.HAS_TRITON = False


def _native_rotation_of_heads() -> None:
    """MLA rotates queries ``[T, heads, D]``, which vLLM's kernel for CPUs takes for other shapes.

    Every head but the first of the first token gets another token's position; the native form of
    the same rotation is right.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        form = self.forward_native if query.dim() == 3 else kernel.__get__(self)
        return form(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def _own_experts_alone() -> None:
    """vLLM's experts on CPU ignore the expert map of expert parallelism.

    They take a model's expert ids for places in the rank's own weights and read past their end,
    which ends the worker. Other ranks' experts have weight zero here.
    """
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    kernel = CPUUnquantizedExperts.apply

    def apply(self: Any, **given: Any) -> None:
        if (expert_map := given["expert_map"]) is not None:
            ids = given["topk_ids"]
            own = expert_map[ids.long()]
            given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0)
            given["topk_ids"] = own.clamp_min(0).to(ids.dtype)
        kernel(self, **given)

    CPUUnquantizedExperts.apply = apply


def _kimi_k3() -> None:
    """Kimi-K3 is written for GPUs."""
    import kimi_k3_on_cpu

    kimi_k3_on_cpu.register()


_SHIMS = {
    "kimi-k3": _kimi_k3,
    "own-experts-alone": _own_experts_alone,
    "native-rotation-of-heads": _native_rotation_of_heads,
    "still-images": _still_images,
    "native-position-interpolation": _native_position_interpolation,
}
