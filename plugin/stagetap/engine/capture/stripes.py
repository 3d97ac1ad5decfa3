"""How a stage's tap cache shares vLLM's blocks with the model's own caches.

All caches of a worker share one pool of blocks. In a model whose layers are alike a block has a
page for each of them, and one for the taps. With several kinds of attention, layers stand in groups
with blocks of their own, and a block has a page for each layer of the largest group: a tap cache of
one layer would fill one page of a block and pay for all. So it is cut into as many stripes of
columns as this stage's blocks have pages, and the stripes of all stages are one group. A page then
holds as many tokens as fit, or nearly so: see :func:`tokens_of_a_page`.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, UniformTypeKVCacheSpecs

from stagetap.engine.capture.cache import Page, TapStripe
from stagetap.engine.compat import get_kv_cache_groups

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec, KVCacheSpec

    from stagetap.engine.capture.cache import TapCache

TAPS = "stagetap.taps"

SLACK = 1 / 16
"""The part of a page that may stay empty for the sake of prefix hits."""

LOSS = 0.045
"""The part of a worker's cache that may stay empty for it. With what block sizes round, less than a
twentieth."""


@dataclass(frozen=True)
class StageCaches:
    """What a stage must know of another.

    Attributes:
        specs: of the model's own cache layers, by name.
        layouts: what its attention supports, most preferred first.
        row: numbers in the taps of one token, 0 for a stage without taps.
    """

    specs: Mapping[str, KVCacheSpec]
    layouts: Sequence[str]
    row: int


def lay_out(
    cache: TapCache | None,
    vllm_config: VllmConfig,
    specs: Mapping[str, KVCacheSpec],
    layouts: Sequence[str],
) -> None:
    """Give a stage's tap cache its layers in vLLM's cache. All stages call this at once.

    Args:
        cache: of this stage; None without taps.
        vllm_config: the engine's.
        specs: of the model's own caches on this stage.
        layouts: what ``get_supported_kv_cache_layouts`` of its worker says.
    """
    group = get_pp_group()
    row = 0 if cache is None else cache.buffer.shape[0] * cache.buffer.shape[2]
    stages = [StageCaches({}, (), 0)] * group.world_size
    own = StageCaches(dict(specs), tuple(layouts), row)
    torch.distributed.all_gather_object(stages, own, group=group.cpu_group)
    if cache is None:
        return
    # vLLM orders cache layers by the integer in their name: stay above the decoder's own.
    first = vllm_config.model_config.get_total_num_hidden_layers()
    stage: int = group.rank_in_group
    rows = [each.row for each in stages]
    groups = groups_with_taps(vllm_config, stages, max(rows))
    if groups is None:
        taps, _, width = cache.buffer.shape
        cache.stripes = (TapStripe(vllm_config, taps, width, f"{TAPS}.{first + stage}"),)
        return
    counts, width = cut(rows, pages_of_a_block(groups, stages))
    groups = groups_with_taps(vllm_config, stages, width) or groups
    page = page_of_taps(vllm_config, groups, slack(vllm_config, stages))
    first += sum(counts[:stage])
    cache.stripes = tuple(
        TapStripe(vllm_config, 1, width, f"{TAPS}.{first + number}", page)
        for number in range(counts[stage])
    )


def groups_with_taps(
    vllm_config: VllmConfig, stages: Sequence[StageCaches], width: int
) -> list[KVCacheGroupSpec] | None:
    """How vLLM would group the caches of all stages and one of taps, named :data:`TAPS`.

    Args:
        vllm_config: the engine's.
        stages: all of them.
        width: numbers in the taps' cache of one token.

    Returns:
        None where all layers are one group.
    """
    config = copy.copy(vllm_config)
    config.cache_config = copy.copy(vllm_config.cache_config)
    merged = {name: spec for stage in stages for name, spec in stage.specs.items()}
    merged[TAPS] = HiddenStateCacheSpec(
        block_size=config.cache_config.block_size,
        num_kv_heads=1,
        head_size=width,
        dtype=config.model_config.dtype,
    )
    if UniformTypeKVCacheSpecs.from_specs(merged) is not None:
        return None
    # vLLM's engine core resolves it in the same way, after this.
    resolve_kv_cache_layout(config, [list(each.layouts) for each in stages], merged.values())
    groups: list[KVCacheGroupSpec] = get_kv_cache_groups(config, merged)
    return groups


def pages_of_a_block(
    groups: Sequence[KVCacheGroupSpec], stages: Sequence[StageCaches]
) -> tuple[int, ...]:
    """How many pages a block has, by stage."""
    return tuple(
        max(sum(name in stage.specs for name in group.layer_names) for group in groups)
        for stage in stages
    )


def slack(vllm_config: VllmConfig, stages: Sequence[StageCaches]) -> float:
    """The part of a page of taps that may stay empty: less where taps are most of the cache.

    Args:
        vllm_config: the engine's.
        stages: all of them; one at least has taps.
    """
    tokens = vllm_config.model_config.max_model_len
    item = vllm_config.model_config.dtype.itemsize
    shares = []
    for stage in stages:
        taps = tokens * stage.row * item
        own = sum(spec.max_memory_usage_bytes(vllm_config) for spec in stage.specs.values())
        shares.append(taps / (taps + own) if taps else 0.0)
    return min(SLACK, LOSS / max(shares))


def page_of_taps(
    vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec], may_stay_empty: float
) -> Page | None:
    """The page of a stripe; None where vLLM does not align pages.

    Args:
        vllm_config: the engine's.
        groups: with one stripe, see :func:`groups_with_taps`.
        may_stay_empty: a part of it, see :func:`slack`.
    """
    (taps,) = (group.kv_cache_spec for group in groups if TAPS in group.layer_names)
    nbytes = taps.page_size_padded
    if nbytes is None:
        return None
    fits = nbytes / (taps.real_page_size_bytes // taps.block_size)
    unit = math.gcd(*(g.kv_cache_spec.block_size for g in groups if TAPS not in g.layer_names))
    cached = vllm_config.cache_config.enable_prefix_caching
    return Page(tokens_of_a_page(fits, unit, may_stay_empty) if cached else int(fits), nbytes)


def tokens_of_a_page(fits: float, unit: int, may_stay_empty: float) -> int:
    """How many tokens a page of taps holds in an engine with a prefix cache.

    vLLM finds a cached prefix at common multiples of all groups' block sizes. Filling a page to the
    last token may put these far apart (25 tokens beside the attention's 16: every 400), halving it
    wastes memory (16 of 25). So of all numbers that leave little empty, the one with the smallest
    common multiple (24 of 25: every 48).

    Args:
        fits: tokens, at least 1; what is behind the point stays empty in any case.
        unit: the block size of the model's own caches, in tokens.
        may_stay_empty: a part of the page.
    """
    most = int(fits)
    enough = range(min(most, math.ceil(fits * (1 - may_stay_empty))), most + 1)
    return min(enough, key=lambda tokens: (math.lcm(tokens, unit), -tokens))


def cut(rows: Sequence[int], pages: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """How many stripes each stage has, and the columns of one: the same on all, as blocks are.

    Args:
        rows: numbers in the taps of one token, by stage; one at least is not 0.
        pages: of a block, by stage.
    """
    width = max(-(-row // max(count, 1)) for row, count in zip(rows, pages, strict=True))
    return tuple(-(-row // width) for row in rows), width
