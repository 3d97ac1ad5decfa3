"""Layer choice, order and ownership: exhaustively, and with vLLM's own partition."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.taps import (
    STREAM_MIXTURE,
    STREAM_PREFIX_SUM,
    STREAM_RESIDUAL,
    StageTaps,
    check_ownership,
    owned_ids,
    parse_layer_ids,
    role_of,
    validate_layer_ids,
)


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([], "empty"),
        ([1, 1], "1 is asked for more than once"),
        ([3, -1], "-1 is negative"),
        ([7], "7 is above 6"),
        ([True], "True is not a layer id"),
        (["3"], "'3' is not a layer id"),
        ([1.0], "1.0 is not a layer id"),
        ([None], "None is not a layer id"),
        ("3", "must be a list"),
        (b"3", "must be a list"),
        (3, "must be a list"),
        ({"a": 1}, "must be a list"),
        (None, "must be a list"),
    ],
)
def test_bad_layers_are_refused_by_name(layers: Any, named: str) -> None:
    with pytest.raises(Refused, match=named.replace("(", r"\(")):
        validate_layer_ids(layers, 6)


def test_asked_order_is_kept() -> None:
    assert validate_layer_ids([6, 0, 3], 6) == (6, 0, 3)
    assert parse_layer_ids("30, 2,15") == (30, 2, 15)


@pytest.mark.parametrize("text", ["", " ", "1,,2", "a", "1.5", "1,1", "-3", "0x1", "2;3"])
def test_bad_text_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="layers"):
        parse_layer_ids(text)


def test_roles() -> None:
    assert [role_of(k, 6) for k in (0, 5, 6)] == ["aux", "aux", "last"]


def parts_of(layers: int) -> st.SearchStrategy[list[int]]:
    """Any way to part ``layers`` over one to eight stages, stages without layers included."""
    return st.lists(st.integers(0, layers), max_size=7).map(
        lambda cuts: [
            b - a for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), layers], strict=True)
        ]
    )


def stages_of(
    partition: list[int], asked: Any, stream: str = STREAM_RESIDUAL
) -> dict[tuple[int, int], StageTaps]:
    stages, start = {}, 0
    for stage, count in enumerate(partition):
        end = start + count
        ids = owned_ids(start, end, asked, sum(partition), stream)
        stages[(stage, 0)] = StageTaps(start, end, ids)
        start = end
    return stages


@pytest.mark.parametrize("stream", [STREAM_RESIDUAL, STREAM_PREFIX_SUM, STREAM_MIXTURE])
@given(data=st.data())
def test_every_id_has_exactly_one_owner_in_any_partition(data: Any, stream: str) -> None:
    layers = data.draw(st.integers(1, 93))
    partition = data.draw(parts_of(layers))
    asked = data.draw(st.permutations(range(layers + 1)))
    stages = stages_of(partition, asked, stream)
    owned = [k for taps in stages.values() for k in taps.layer_ids]
    assert sorted(owned) == list(range(layers + 1))
    result = check_ownership(asked, layers, stages)
    assert [k for taps in result for k in taps.layer_ids] == list(range(layers + 1))


@pytest.mark.parametrize("layers", [6, 7, 32, 35, 36, 37, 61, 93])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 6, 8])
def test_every_id_has_exactly_one_owner_in_vllms_own_partition(layers: int, pp: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    asked = range(layers + 1)
    stages = {}
    for stage in range(pp):
        start, end = get_pp_indices(layers, stage, pp)
        stages[(stage, 0)] = StageTaps(start, end, owned_ids(start, end, asked, layers))
    result = check_ownership(asked, layers, stages)
    assert [k for taps in result for k in taps.layer_ids] == list(asked)


def test_the_mixture_belongs_to_the_stage_that_reads_it() -> None:
    """A boundary moves to the next stage; the embedding stays on the first, N on the last."""
    asked = range(9)
    by_stage = {
        stream: [taps.layer_ids for taps in stages_of([3, 0, 5], asked, stream).values()]
        for stream in (STREAM_PREFIX_SUM, STREAM_MIXTURE)
    }
    assert by_stage[STREAM_PREFIX_SUM] == [(0, 1, 2, 3), (), (4, 5, 6, 7, 8)]
    assert by_stage[STREAM_MIXTURE] == [(0, 1, 2), (), (3, 4, 5, 6, 7, 8)]


def test_a_stage_may_own_no_tap() -> None:
    """The published drafts of a 93-layer model on four stages."""
    from vllm.distributed.utils import get_pp_indices

    asked = [2, 23, 47, 71, 89]
    stages = {}
    for stage in range(4):
        start, end = get_pp_indices(93, stage, 4)
        stages[(stage, 0)] = StageTaps(start, end, owned_ids(start, end, asked, 93))
    owned = [taps.layer_ids for taps in check_ownership(asked, 93, stages)]
    assert owned == [(2, 23), (), (47,), (71, 89)]


@pytest.mark.parametrize(
    ("partition", "boundary"), [([3, 3], 3), ([1, 4, 1], 5), ([0, 1, 1, 1, 1, 1, 1, 0], 4)]
)
def test_a_boundary_tap_belongs_to_the_stage_that_ends_there(
    partition: list[int], boundary: int
) -> None:
    stages = stages_of(partition, [boundary])
    (owner,) = [taps for taps in stages.values() if taps.layer_ids]
    assert owner.end == boundary


GOOD = stages_of([3, 3], [0, 2, 5])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({(1, 0): StageTaps(3, 6, ())}, "tap 5 would be captured by no stage"),
        ({(1, 0): StageTaps(3, 6, (2, 5))}, r"tap 2 would be captured by stages \[0, 1\]"),
        ({(1, 0): StageTaps(3, 6, (4, 5))}, r"taps \[4\] that nobody asked for"),
        ({(1, 0): StageTaps(4, 6, (5,))}, r"stage 1 runs layers \[4, 6\) where layer 3"),
        ({(1, 0): StageTaps(3, 5, (5,))}, "the stages run 5 layers of 6"),
        ({(1, 1): StageTaps(3, 6, ())}, "tensor-parallel ranks of stage 1"),
        ({(2, 0): StageTaps(6, 7, ())}, "the stages run 7 layers of 6"),
        ({(3, 0): StageTaps(6, 6, ())}, "stage 2 did not say"),
    ],
)
def test_workers_that_do_not_fit_together_are_refused(
    changes: dict[tuple[int, int], StageTaps], named: str
) -> None:
    check_ownership([0, 2, 5], 6, GOOD)
    with pytest.raises(Refused, match=named):
        check_ownership([0, 2, 5], 6, {**GOOD, **changes})
