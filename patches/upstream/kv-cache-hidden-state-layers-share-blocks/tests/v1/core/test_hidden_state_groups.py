# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hidden-state cache layers of one spec share a group, with pages as they ask for."""

from types import SimpleNamespace

import torch

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

ATTENTION = {
    "block_size": 64,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
PAGE = 64 * 2 * 2 * 32 * 2  # bytes: tokens, K and V, heads, head size, bfloat16


def groups_of(hidden: dict[str, int], **aligned: int):
    """The groups of hidden-state layers, by name and numbers a token, in a hybrid."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        cache_config=SimpleNamespace(
            enable_prefix_caching=True,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        speculative_config=None,
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    specs = {f"layers.{i}.attn": FullAttentionSpec(**ATTENTION) for i in (0, 1)}
    for i in (2, 3, 4, 5):
        specs[f"layers.{i}.attn"] = SlidingWindowSpec(sliding_window=128, **ATTENTION)
    for name, numbers in hidden.items():
        specs[name] = HiddenStateCacheSpec(
            num_kv_heads=1,
            head_size=numbers,
            dtype=torch.bfloat16,
            **{"block_size": 64, **aligned},
        )
    groups = get_kv_cache_groups(config, specs)
    return [g for g in groups if isinstance(g.kv_cache_spec, HiddenStateCacheSpec)]


def test_layers_of_one_spec_share_a_group():
    groups = groups_of({"a.6": 448, "b.7": 448, "c.8": 100})
    assert [g.layer_names for g in groups] == [["a.6", "b.7"], ["c.8"]]
    assert all(g.kv_cache_spec.page_size_bytes == PAGE for g in groups)


def test_a_page_holds_a_divisor_of_what_attention_does():
    (group,) = groups_of({"a.6": 448})
    assert group.kv_cache_spec.block_size == 16


def test_a_layer_with_aligned_pages_says_how_many_tokens_they_hold():
    (group,) = groups_of({"a.6": 448}, block_size=18, page_size_padded=PAGE)
    assert group.kv_cache_spec.block_size == 18
    (group,) = groups_of({"a.6": 448}, block_size=18, page_size_padded=PAGE // 2)
    assert group.kv_cache_spec.block_size == 16
