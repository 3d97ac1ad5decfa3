"""From the forward pass into this stage's tap cache.

Every stage owns one cache layer, paged like the KV cache beside it, with one head per tap that the
stage captures. Forward hooks on the stage's decoder layers write each tap into the pages while the
step runs, so chunked prefill, cached prefixes and preemption need no thought of their own: a token
whose KV entries are there has its taps there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.utils.torch_utils import is_quantized_kv_cache

from stagetap.engine.families import inner_decoder
from stagetap.engine.invariant import BrokenInvariant
from stagetap.errors import Refused
from stagetap.taps import StageTaps, owned_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name


class TapCacheLayer(CacheOnlyAttentionLayer):
    """Pages for the taps of one stage: one head of ``hidden_size`` per tap, ascending ids.

    Attributes:
        taps: the stage's layers and the ids in its columns.
    """

    def __init__(self, vllm_config: VllmConfig, taps: StageTaps, layer_name: str):
        cache_config = vllm_config.cache_config
        if is_quantized_kv_cache(cache_config.cache_dtype):
            # Taps keep the model's dtype, whatever the KV cache is stored in.
            cache_config = replace(cache_config, cache_dtype="auto")
        with set_current_vllm_config(vllm_config):
            super().__init__(
                num_heads=len(taps.layer_ids),
                head_size=vllm_config.model_config.get_hidden_size(),
                cache_config=cache_config,
                prefix=layer_name,
            )
        self.taps = taps
        self.columns_written: set[int] = set()

    def write(self, column: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Store one tap of this step's tokens.

        Args:
            column: which of the stage's taps.
            hidden: ``[num_tokens, hidden_size]``, rows in batch order, padding included.
            residual: what a decoder layer hands on beside ``hidden``, same shape, or None.

        Raises:
            BrokenInvariant: the tap has another number of rows than the step has tokens.
        """
        context = get_forward_context()
        if context.attn_metadata is None:
            return  # a profiling run: no pages exist yet
        slots = context.slot_mapping[self.layer_name]  # [num_tokens]
        stream = hidden if residual is None else hidden + residual
        if stream.shape != (slots.shape[0], self.head_size):
            raise BrokenInvariant(
                f"tap {self.taps.layer_ids[column]} has shape {tuple(stream.shape)} in a "
                f"step of {slots.shape[0]} tokens; this model hands on something else than whole "
                "rows"
            )
        block_size = self.kv_cache.shape[2]
        # Padding rows carry slot -1: they go to block 0, which vLLM never gives to a request.
        slots = slots.clamp_min(0)
        self.kv_cache[slots // block_size, column, slots % block_size] = stream
        self.columns_written.add(column)

    def begin_step(self) -> None:
        """Before a step with tokens: forget what warm-up steps wrote."""
        self.columns_written = set()

    def check_step(self) -> None:
        """After a step with tokens: every tap was written once.

        Raises:
            BrokenInvariant: the model ran past a hook. Nothing of such a step may be published.
        """
        missing = set(range(self.num_heads)) - self.columns_written
        if missing:
            ids = [self.taps.layer_ids[column] for column in sorted(missing)]
            raise BrokenInvariant(f"a step ran without capturing taps {ids}")


@dataclass(frozen=True)
class Capture:
    """What a worker captures, known once its model is loaded; no layer when it owns no tap."""

    taps: StageTaps
    layer: TapCacheLayer | None


_captures: dict[str, Capture] = {}  # by VllmConfig.instance_id: from worker to its connector


def install_capture(model: nn.Module, vllm_config: VllmConfig, asked: Iterable[int]) -> None:
    """Hook the decoder layers of this stage and add its tap cache layer.

    Raises:
        Refused: the model's decoder is none that StageTap can capture from.
    """
    _captures[vllm_config.instance_id] = _install(model, vllm_config, tuple(asked))


def installed_capture(vllm_config: VllmConfig) -> Capture:
    """What :func:`install_capture` set up in this process.

    Raises:
        Refused: nothing was, so this worker is not ours.
    """
    try:
        return _captures[vllm_config.instance_id]
    except KeyError:
        raise Refused(
            "this worker loaded its model without capture; the patch series is missing or "
            "another --worker-cls runs: run `stagetap patch apply`"
        ) from None


def _install(model: nn.Module, vllm_config: VllmConfig, asked: tuple[int, ...]) -> Capture:
    decoder = inner_decoder(model)
    taps = StageTaps(
        start=decoder.start_layer,
        end=decoder.end_layer,
        layer_ids=owned_ids(decoder.start_layer, decoder.end_layer, asked),
    )
    if not taps.layer_ids:
        return Capture(taps, None)
    stage = get_pp_group().rank_in_group
    total = vllm_config.model_config.get_total_num_hidden_layers()
    # vLLM orders cache layers by the integer in their name: stay above the decoder's own.
    layer = TapCacheLayer(vllm_config, taps, f"stagetap.taps.{total + stage}")
    for column, layer_id in enumerate(taps.layer_ids):
        if layer_id == 0:
            decoder.layers[0].register_forward_pre_hook(
                _input_hook(layer, column), with_kwargs=True
            )
        else:
            decoder.layers[layer_id - 1].register_forward_hook(_output_hook(layer, column))
    return Capture(taps, layer)


def _output_hook(layer: TapCacheLayer, column: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        hidden, residual = output
        layer.write(column, hidden, residual)

    return hook


def _input_hook(layer: TapCacheLayer, column: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Decoder layers take (positions, hidden_states, residual).
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
        layer.write(column, hidden, None)

    return hook
