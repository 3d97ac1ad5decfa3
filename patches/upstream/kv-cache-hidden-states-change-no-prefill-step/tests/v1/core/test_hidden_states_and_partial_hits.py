# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A hidden-state cache does not make a model with state spaces hash finer."""

import torch

from vllm.v1.core.kv_cache_utils import partial_hash_hits_enabled
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    MambaSpec,
)

HASH = 8


def groups(*, attention: int, hidden: int | None = None) -> list[KVCacheGroupSpec]:
    """State spaces of 64 tokens a block, attention and hidden states of so many."""
    mamba = MambaSpec(
        block_size=64,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
    )
    heads = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
    specs = [mamba, FullAttentionSpec(block_size=attention, **heads)]
    if hidden is not None:
        specs.append(HiddenStateCacheSpec(block_size=hidden, **heads))
    return [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]


def test_without_hidden_states_prompts_end_at_a_hash():
    assert partial_hash_hits_enabled(groups(attention=8), HASH)


def test_with_hidden_states_they_do_not():
    assert not partial_hash_hits_enabled(groups(attention=64, hidden=24), HASH)
    assert not partial_hash_hits_enabled(groups(attention=64, hidden=HASH), HASH)
