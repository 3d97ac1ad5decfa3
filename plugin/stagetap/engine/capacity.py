"""How many tokens fit one stage's KV cache with capture and without, by vLLM's own arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, UniformTypeKVCacheSpecs

from stagetap.engine.compat import get_kv_cache_config_from_groups

if TYPE_CHECKING:
    from collections.abc import Container, Iterator

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def capacity(vllm_config: VllmConfig, config: KVCacheConfig) -> int:
    """Tokens of requests of the longest length, as vLLM counts them when it starts."""
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, config)
    return int(concurrency * vllm_config.model_config.max_model_len)


def without_layers(
    vllm_config: VllmConfig, config: KVCacheConfig, names: Container[str]
) -> KVCacheConfig:
    """What the same memory would hold if some layers were not there."""
    memory = max(tensor.size for tensor in config.kv_cache_tensors)  # each is all there is
    groups = list(_groups_without(config.kv_cache_groups, names))
    return get_kv_cache_config_from_groups(vllm_config, groups, memory)


def _groups_without(
    groups: list[KVCacheGroupSpec], names: Container[str]
) -> Iterator[KVCacheGroupSpec]:
    for group in groups:
        kept = [name for name in group.layer_names if name not in names]
        if len(kept) == len(group.layer_names):
            yield group
        elif kept:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = UniformTypeKVCacheSpecs(
                    block_size=spec.block_size,
                    kv_cache_specs={name: spec.kv_cache_specs[name] for name in kept},
                )
            yield KVCacheGroupSpec(kept, spec)
