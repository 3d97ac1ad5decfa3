"""How a tap cache is cut for blocks of several pages. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from stagetap.engine.capacity import capacity, without_layers
from stagetap.engine.capture.stripes import SLACK, StageCaches, cut, slack, tokens_of_a_page
from stagetap.engine.worker_side import _cache_group
from stagetap.errors import Refused


@pytest.mark.parametrize(
    ("rows", "pages", "counts", "width"),
    [
        ([896], [2], (2,), 448),
        ([512, 384], [1, 1], (1, 1), 512),
        ([768, 256], [5, 5], (5, 2), 154),
        ([0, 300], [2, 3], (0, 3), 100),
        ([100, 0], [0, 4], (1, 0), 100),  # a stage without caches of its own has one page
    ],
)
def test_all_stages_have_stripes_of_one_width(
    rows: list[int], pages: list[int], counts: tuple[int, ...], width: int
) -> None:
    assert cut(rows, pages) == (counts, width)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 12)), min_size=1, max_size=4).filter(
        lambda stages: any(row for row, _ in stages)
    )
)
def test_no_stage_has_more_stripes_than_pages_or_an_empty_one(
    stages: list[tuple[int, int]],
) -> None:
    rows, pages = zip(*stages, strict=True)
    counts, width = cut(rows, pages)
    for row, page, count in zip(rows, pages, counts, strict=True):
        assert count <= page
        assert (count - 1) * width < row <= count * width or row == count == 0


@pytest.mark.parametrize(
    ("fits", "unit", "tokens"),
    [
        (25, 16, 24),  # hits every 48 tokens: all 25 would put them 400 apart
        (16, 16, 16),
        (33, 16, 32),
        (3, 16, 3),
        (1, 16, 1),
        (122, 16, 120),
        (17, 16, 16),
        (18, 64, 18),
        (76.8, 384, 72),  # every 1152
        (76.9, 384, 76),  # 72 would leave more than a sixteenth empty
    ],
)
def test_a_page_is_all_but_full_and_prefixes_are_found(fits: float, unit: int, tokens: int) -> None:
    assert tokens_of_a_page(fits, unit, SLACK) == tokens


@given(st.floats(1, 3000), st.sampled_from([16, 48, 128, 544]))
def test_little_of_a_page_stays_empty(fits: float, unit: int) -> None:
    tokens = tokens_of_a_page(fits, unit, SLACK)
    assert min(int(fits), 15 / 16 * fits) <= tokens <= fits


@pytest.mark.parametrize(("row", "expected"), [(64, SLACK), (1024, 0.045 / 0.9)])
def test_less_may_stay_empty_where_taps_are_most_of_the_cache(row: int, expected: float) -> None:
    """Of two stages with four layers of attention each, one has taps of 64 or of 1024 numbers."""
    attention = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=14, dtype=torch.bfloat16)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=1600, dtype=torch.bfloat16),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
    )
    layers = {f"layers.{n}": attention for n in range(4)}
    stages = [StageCaches(layers, (), 0), StageCaches(layers, (), row)]
    assert slack(config, stages) == pytest.approx(expected, rel=0.02)


def _config(groups: list[list[str]]) -> KVCacheConfig:
    """100 blocks of two pages, and specs told by the names."""
    attention = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    page = attention.page_size_bytes
    taps = HiddenStateCacheSpec(
        block_size=8, num_kv_heads=1, head_size=page // 16, dtype=torch.bfloat16
    )
    return KVCacheConfig(
        num_blocks=100,
        kv_cache_tensors=[KVCacheTensor(200 * page, groups[0], 100 * page, page)],
        kv_cache_groups=[
            KVCacheGroupSpec(names, taps if names[0].startswith("taps") else attention)
            for names in groups
        ],
    )


def test_a_group_holds_all_stripes_or_the_layout_is_refused() -> None:
    cache: Any = SimpleNamespace(layer_names=("taps.6", "taps.7"))
    config = _config([["layers.0", "layers.1"], ["taps.6", "taps.7"]])
    assert _cache_group(config, cache) == 1
    assert _cache_group(config, None) is None
    with pytest.raises(Refused, match=r"the 2 stripes .* several groups.*VLLM_KV_CACHE_LAYOUT"):
        _cache_group(_config([["layers.0"], ["taps.6"], ["taps.7"]]), cache)


def test_capacity_is_told_with_taps_and_without() -> None:
    """Of 1600 tokens a block each 16, taps take two blocks more: a third is left."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=160),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    caches = _config([["layers.0", "layers.1"], ["taps.6", "taps.7"]])
    assert capacity(config, without_layers(config, caches, ("taps.6", "taps.7"))) == 1600
    assert capacity(config, caches) == 1600 // 3
