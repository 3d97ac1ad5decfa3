"""Where taps are kept: fixed buffers that the forward pass fills, pages that a step leaves.

The forward pass may be compiled or recorded as a CUDA graph, so what runs inside it is one operator
that copies rows into a buffer of fixed place and size, and counts them. After the forward pass the
rows go to vLLM's pages, at vLLM's own slot mapping.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.models.extract_hidden_states import CacheOnlyAttentionLayer
from vllm.utils.torch_utils import direct_register_custom_op

from stagetap.engine.compat import is_quantized_kv_cache
from stagetap.engine.invariant import BrokenInvariant
from stagetap.engine.pages import TapPages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from stagetap.taps import StageTaps


def keep_tap(
    buffer: torch.Tensor,
    counts: torch.Tensor,
    column: int,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """Copy one tap of a step into its buffer, and count its rows.

    Args:
        buffer: ``[L, max_tokens, H]``.
        counts: ``[L, 2]`` int64, calls and rows since the step began.
        column: which tap.
        hidden: ``[..., H]``; leading dimensions are one step's tokens.
        residual: added to ``hidden`` when given, same shape.
    """
    rows = hidden.reshape(-1, buffer.shape[2])
    place = buffer[column, : rows.shape[0]]
    if residual is None:
        place.copy_(rows)
    else:
        torch.add(rows, residual.reshape(rows.shape), out=place)
    counts[column, 0] += 1
    counts[column, 1] += rows.shape[0]


def _keep_nothing(
    buffer: torch.Tensor,
    counts: torch.Tensor,
    column: int,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> None:
    """What a compiler sees: nothing comes out."""


_operators = torch.library.Library("stagetap", "FRAGMENT")
direct_register_custom_op(
    "keep_tap",
    keep_tap,
    mutates_args=["buffer", "counts"],
    fake_impl=_keep_nothing,
    target_lib=_operators,
)


@dataclass(frozen=True)
class Page:
    """What a page of a stripe holds.

    Attributes:
        tokens: whose rows are in it.
        nbytes: of the page, which may be more than the rows take.
    """

    tokens: int
    nbytes: int


class TapStripe(CacheOnlyAttentionLayer):
    """Some columns of a stage's tap cache: pages ``[heads, block_size, head_size]`` to vLLM.

    Args:
        vllm_config: the engine's.
        heads: of a row, to vLLM.
        head_size: numbers of each.
        layer_name: what vLLM calls it.
        page: what one holds; None for vLLM's own block size.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        heads: int,
        head_size: int,
        layer_name: str,
        page: Page | None = None,
    ):
        cache_config = vllm_config.cache_config
        if is_quantized_kv_cache(cache_config.cache_dtype):
            # Taps keep the model's dtype, whatever the KV cache is stored in.
            cache_config = replace(cache_config, cache_dtype="auto")
        with set_current_vllm_config(vllm_config):
            super().__init__(
                num_heads=heads,
                head_size=head_size,
                cache_config=cache_config,
                prefix=layer_name,
            )
        self._page = page

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """What vLLM is to reserve for it."""
        spec = super().get_kv_cache_spec(vllm_config)
        if self._page is None:
            return spec
        page = self._page
        return replace(spec, block_size=page.tokens, page_size_padded=page.nbytes)


class TapCache:
    """The taps of one stage: a buffer that a step fills, and pages that keep its rows.

    Attributes:
        taps: the stage's layers and the ids in its columns.
        buffer: ``[L, max_tokens, H]``, the rows of one step.
        counts: ``[L, 2]``, how often each tap was given in this step, and how many rows in all.
        stripes: its layers in vLLM's cache, see :mod:`stagetap.engine.capture.stripes`; none
            before vLLM asks for the caches of this worker.
    """

    def __init__(self, vllm_config: VllmConfig, taps: StageTaps):
        self.taps = taps
        device = vllm_config.device_config.device
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        dtype = vllm_config.model_config.dtype
        width = vllm_config.model_config.get_hidden_size()
        self.buffer = torch.zeros(len(taps.layer_ids), rows, width, dtype=dtype, device=device)
        self.counts = torch.zeros(len(taps.layer_ids), 2, dtype=torch.int64, device=device)
        self.stripes: tuple[TapStripe, ...] = ()
        self._wrong = torch.zeros((), dtype=torch.bool, device=device)

    @property
    def layer_names(self) -> tuple[str, ...]:
        """What vLLM calls its layers; they share one group, and so blocks and slots."""
        return tuple(stripe.layer_name for stripe in self.stripes)

    def pages(self) -> TapPages:
        """Its memory, once vLLM has bound it."""
        taps, _, width = self.buffer.shape
        return TapPages.of([stripe.kv_cache for stripe in self.stripes], (taps, width))

    def keep(self, column: int, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> None:
        """Called from hooks in the forward pass; see :func:`keep_tap`."""
        torch.ops.stagetap.keep_tap(self.buffer, self.counts, column, hidden, residual)

    def begin_step(self) -> None:
        """Before a forward pass: nothing has been seen of it."""
        self.counts.zero_()

    def end_step(self, slots: torch.Tensor) -> None:
        """After a forward pass: every tap has all rows, which go to their pages.

        Args:
            slots: vLLM's slot mapping of this cache, ``[num_tokens]``, padding included as -1.

        Raises:
            BrokenInvariant: the model ran past a hook, or handed on something else than whole rows.
                Nothing of such a step may be published. On a device :meth:`check` raises it.
        """
        rows = slots.shape[0]
        # Rows of a second call would lie over those of the first.
        self._wrong |= (self.counts[:, 0] != 1).any() | (self.counts[:, 1] != rows).any()
        if not self._wrong.is_cuda:
            self.check()
        # Padding goes to block 0, which vLLM never gives to a request.
        self.pages().write(slots.clamp_min(0), self.buffer[:, :rows].transpose(0, 1))

    def check(self) -> None:
        """Whether every step so far was captured; waits for the device.

        Raises:
            BrokenInvariant: one was not.
        """
        if self._wrong.item():
            seen = dict(zip(self.taps.layer_ids, map(tuple, self.counts.tolist()), strict=True))
            raise BrokenInvariant(
                "a step ran without capturing each of its tokens once "
                f"(calls and rows by tap: {seen})"
            )
