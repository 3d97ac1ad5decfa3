"""Kimi-K3's block attention residuals: which stream taps are of, and the code that computes one.

Its layers hand on a prefix sum, what has to be added to it, and the block states; what a layer then
reads is a mixture of these, scored with that layer's own weights. Both are called the stream after
a layer. Which one vLLM's own tap code gives is said by the variable ``MIXTURE_ENV``; no module is
ever given the mixture, so it is computed, by that same code, from what the layer is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm import envs

from stagetap.errors import Refused
from stagetap.taps import MIXTURE_ENV, STREAM_MIXTURE, STREAM_PREFIX_SUM, STREAM_RESIDUAL

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

MIX = "_capture_aux_hidden_stream"
"""Of a decoder: (index of the layer that ran, prefix sum, what is to be added, block states)."""

INTO_LAYER = ("prefix_sum", "hidden_states", "residual")
OUT_OF_LAYER = (1, 0, 2)
"""Where MIX's tensors are among a layer's arguments, and in what it gives."""


def stream_of(decoder: nn.Module) -> str:
    """Which stream the taps of a loaded model are of.

    Args:
        decoder: the module that runs the layers.

    Raises:
        Refused: the mixture is asked of a decoder that has no code for it, such as that for ROCm.
    """
    if getattr(getattr(decoder, "config", None), "attn_res_block_size", None) is None:
        return STREAM_RESIDUAL
    if not envs.VLLM_KIMI_K3_AUX_ATTN_RES_STREAM:
        return STREAM_PREFIX_SUM
    if not hasattr(decoder, MIX):
        raise Refused(
            f"{type(decoder).__module__}.{type(decoder).__name__} cannot compute the mixture of "
            f"its attention residuals; unset {MIXTURE_ENV} to capture the prefix sum"
        )
    return STREAM_MIXTURE


def mixture(decoder: nn.Module, layer_id: int) -> Callable[..., torch.Tensor]:
    """What computes tap ``layer_id`` from the tensors of INTO_LAYER or OUT_OF_LAYER, ``[T, H]``."""
    mix = getattr(decoder, MIX)

    def compute(
        prefix_sum: torch.Tensor, pending: torch.Tensor | None, blocks: torch.Tensor
    ) -> torch.Tensor:
        tap: torch.Tensor = mix(layer_id - 1, prefix_sum, pending, blocks)
        return tap

    return compute
