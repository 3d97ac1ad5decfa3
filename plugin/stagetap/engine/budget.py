"""What a worker has left for KV blocks, and what moving a layer would move: told once, at start."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

from stagetap.engine.capture import installed_capture
from stagetap.plan.balance import StageBudget

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

_budgets: dict[str, StageBudget | None] = {}  # by VllmConfig.instance_id, as captures are


def note_budget(
    vllm_config: VllmConfig,
    model: nn.Module,
    cache_specs: dict[str, KVCacheSpec],
    available_bytes: int,
) -> None:
    """Keep what this worker measured, for its connector.

    Args:
        model: the loaded model of this rank.
        cache_specs: of all its cache layers, the tap cache among them.
        available_bytes: what ``determine_available_memory`` is about to return.
    """
    _budgets[vllm_config.instance_id] = measured_budget(
        vllm_config, model, cache_specs, available_bytes
    )


def noted_budget(vllm_config: VllmConfig) -> StageBudget | None:
    """What was kept; None where nothing was, or where layers are not alike."""
    return _budgets.get(vllm_config.instance_id)


def measured_budget(
    vllm_config: VllmConfig,
    model: nn.Module,
    cache_specs: dict[str, KVCacheSpec],
    available_bytes: int,
) -> StageBudget | None:
    """What this worker says of itself; arguments are those of :func:`note_budget`."""
    if UniformTypeKVCacheSpecs.from_specs(cache_specs) is None:
        return None  # hybrid: groups of layers share pages, and bytes of a layer do not add up
    capture = installed_capture(vllm_config)
    own = range(capture.taps.start, capture.taps.end)
    weights, blocks = dict.fromkeys(own, 0), dict.fromkeys(own, 0)
    given = current_platform.is_cpu() or vllm_config.cache_config.kv_cache_memory_bytes is not None
    tap_block = tap_fixed = 0
    tap_layers: tuple[str, ...] = ()
    if capture.cache is not None:
        taps = len(capture.taps.layer_ids)
        tap_layers = capture.cache.layer_names
        tap_block = sum(cache_specs[name].page_size_bytes for name in tap_layers) // taps
        tap_fixed = 0 if given else _bytes(capture.cache.buffer) // taps
    for name, spec in cache_specs.items():
        if name in tap_layers:
            continue
        if (index := _layer_index(name)) not in blocks:
            return None  # a cache that is no decoder layer's: advice is no reason to guess
        blocks[index] += spec.page_size_bytes
    if not given:
        for name, parameter in model.named_parameters():
            if (index := _layer_index(name)) in weights:
                weights[index] += _bytes(parameter)
    return StageBudget(
        available_bytes=available_bytes,
        layer_weight_bytes=tuple(weights[index] for index in own),
        layer_block_bytes=tuple(blocks[index] for index in own),
        tap_block_bytes=tap_block,
        tap_fixed_bytes=tap_fixed,
    )


def _layer_index(name: str) -> int:
    """The decoder layer that a parameter or a cache belongs to, -1 for none."""
    _, found, rest = name.partition("layers.")
    number = rest.partition(".")[0]
    return int(number) if found and number.isdigit() else -1


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
