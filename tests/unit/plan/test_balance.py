"""When another partition is worth saying: by hand, and against trying everything."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.plan.balance import Balance, StageBudget, better_partition, engine_balance
from stagetap.taps import STREAM_RESIDUAL

LAYERS = 8


def balance(**changes: Any) -> Balance:
    """Two stages of four equal layers with room for 100 blocks a stage, no taps."""
    settings: dict[str, Any] = {
        "partition": (4, 4),
        "memory_bytes": (4 * 1000 + 4 * 100, 4 * 1000 + 4 * 100),
        "layer_weight_bytes": (1000,) * LAYERS,
        "layer_block_bytes": (1,) * LAYERS,
        "layer_ids": (),
        "tap_block_bytes": 2,
        "tap_fixed_bytes": 0,
    }
    return Balance(**settings | changes)


def test_equal_stages_stay() -> None:
    even = balance()
    assert even.blocks((4, 4)) == (100, 100)
    assert better_partition(even) is None


def test_taps_push_a_layer_away() -> None:
    """Both taps on the last stage: it holds (4400 - 4000) / (4 + 2 * 2) blocks, the first 100."""
    tapped = balance(layer_ids=(7, 8), memory_bytes=(5500, 4400))
    assert tapped.blocks((4, 4)) == (375, 50)
    advice = better_partition(tapped)
    assert advice is not None
    assert advice.partition == (5, 3)
    # (5500 - 5000) / 5 and (4400 - 3000) / (3 + 4).
    assert tapped.blocks(advice.partition) == (100, 200)
    assert (advice.smallest, advice.source, advice.target) == (1, 1, 0)
    assert advice.gain == pytest.approx(1.0)
    assert advice.line() == (
        "KV blocks are those of the smallest stage, stage 1; one layer from stage 1 to stage 0 "
        "would give 100% more: VLLM_PP_LAYER_PARTITION=5,3"
    )


def test_a_tap_may_move_with_its_boundary() -> None:
    """Tap 4 belongs to the first stage as long as that runs layer 3."""
    tapped = balance(layer_ids=(4,), layer_weight_bytes=(0,) * LAYERS, memory_bytes=(400, 400))
    assert tapped.blocks((4, 4)) == (400 / 6, 100)
    assert tapped.blocks((3, 5)) == (400 / 3, 400 / 7)
    assert better_partition(tapped) is None


def test_capture_buffers_count() -> None:
    tapped = balance(layer_ids=(8,), tap_block_bytes=0, tap_fixed_bytes=200)
    assert tapped.blocks((4, 4)) == (100, 50)


def test_five_per_cent_is_not_over_five_per_cent() -> None:
    settings: dict[str, Any] = {
        "partition": (2, 2),
        "layer_weight_bytes": (0,) * 4,
        "layer_block_bytes": (1,) * 4,
        "memory_bytes": (200, 400),
    }
    uneven = balance(**settings)  # 100 and 200; then 200 and 133
    advice = better_partition(uneven)
    assert advice is not None
    assert advice.gain == pytest.approx(1 / 3)
    assert better_partition(uneven, worth=0.34) is None
    assert better_partition(uneven, worth=0.33) is not None


def test_a_stage_without_room() -> None:
    full = balance(memory_bytes=(3500, 6000))
    assert full.blocks((4, 4)) == (0, 500)
    advice = better_partition(full)
    assert advice is not None
    assert advice.gain == float("inf")
    assert "would give room for any: VLLM_PP_LAYER_PARTITION=3,5" in advice.line()


def test_a_stage_keeps_its_last_layer() -> None:
    lonely = balance(partition=(1, 7), memory_bytes=(1001, 7700))
    assert better_partition(lonely) is None or better_partition(lonely).partition != (0, 8)


def test_stages_that_cache_nothing_do_not_count() -> None:
    idle = balance(layer_block_bytes=(0,) * 4 + (1,) * 4)
    assert idle.blocks((4, 4)) == (float("inf"), 100)
    advice = better_partition(idle)
    assert advice is None  # the first stage has no room for a layer's weights


def test_from_an_engines_own_numbers() -> None:
    measured = Balance.measured(
        partition=[4, 4],
        available_bytes=[400, 360],
        layer_weight_bytes=[1000] * LAYERS,
        layer_block_bytes=[1] * LAYERS,
        layer_ids=[8],
        tap_block_bytes=2,
        tap_fixed_bytes=40,
    )
    assert measured.memory_bytes == (4400, 4400)
    assert measured.blocks((4, 4)) == (100, 60)


def budget(available: int, layers: int, **changes: Any) -> StageBudget:
    """What a rank of a stage with equal layers measured."""
    settings: dict[str, Any] = {
        "available_bytes": available,
        "layer_weight_bytes": (1000,) * layers,
        "layer_block_bytes": (1,) * layers,
        "tap_block_bytes": 0,
        "tap_fixed_bytes": 0,
    }
    return StageBudget(**settings | changes)


def test_what_ranks_measured_makes_a_balance() -> None:
    """The rank with least counts, and taps weigh what their owner says."""
    first = [budget(400, 3), budget(300, 3)]
    last = [budget(500, 5, tap_block_bytes=2, tap_fixed_bytes=40)] * 2
    balance = engine_balance([first, last], [8], STREAM_RESIDUAL)
    assert balance is not None
    assert balance.partition == (3, 5)
    assert balance.blocks((3, 5)) == (100, 500 / 7)
    assert engine_balance([first, [last[0], None]], [8], STREAM_RESIDUAL) is None
    assert engine_balance([first, []], [8], STREAM_RESIDUAL) is None


def test_stages_must_match() -> None:
    with pytest.raises(Refused, match="2 stages have memory, 3 have layers"):
        better_partition(balance(partition=(3, 3, 2)))


@given(
    st.lists(st.integers(1, 5), min_size=2, max_size=4).flatmap(
        lambda partition: st.tuples(
            st.just(tuple(partition)),
            st.lists(st.integers(0, 60), min_size=len(partition), max_size=len(partition)),
            st.lists(st.integers(0, 9), min_size=sum(partition), max_size=sum(partition)),
            st.lists(st.integers(1, 3), min_size=sum(partition), max_size=sum(partition)),
            st.sets(st.integers(0, sum(partition))),
        )
    )
)
def test_nothing_better_is_missed(case: Any) -> None:
    partition, available, weights, blocks, ids = case
    measured = Balance.measured(partition, available, weights, blocks, sorted(ids), 2, 5)
    now = min(measured.blocks(partition))
    assert now == min(
        room / (sum(blocks[start:end]) + 2 * sum(start < k <= end or k == start == 0 for k in ids))
        for room, (start, end) in zip(
            available, itertools.pairwise(itertools.accumulate(partition, initial=0)), strict=True
        )
    )
    best = now
    for source, target in itertools.permutations(range(len(partition)), 2):
        moved = list(partition)
        moved[source] -= 1
        moved[target] += 1
        if moved[source] > 0:
            best = max(best, min(measured.blocks(moved)))
    advice = better_partition(measured)
    if advice is None:
        assert best <= now * (1 + 0.05 + 1e-9)
    else:
        assert min(measured.blocks(advice.partition)) == best
        assert best > now
        assert sum(advice.partition) == sum(partition)
