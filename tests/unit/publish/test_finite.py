"""A NaN or Inf is found where it is, and nothing else is taken for one."""

import math
import tracemalloc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagetap.publish.finite import first_nonfinite

BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
}


def brute_force(rows: torch.Tensor) -> tuple[int, int] | None:
    bad = torch.nonzero(~torch.isfinite(rows))  # [count, 3], in row order
    return (int(bad[0][0]), int(bad[0][1])) if len(bad) else None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_pattern_of_16_bits_is_judged_as_torch_judges_it(dtype: torch.dtype) -> None:
    rows = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(-1, 1, 1)
    finite = [first_nonfinite(row) is None for row in rows.split(1)]
    assert finite == torch.isfinite(rows).flatten().tolist()


@given(
    dtype=st.sampled_from(list(BITS)),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6)),
    data=st.data(),
)
def test_the_first_of_any_states_is_found(
    dtype: torch.dtype, shape: tuple[int, int, int], data: st.DataObject
) -> None:
    info = torch.finfo(dtype)
    half = 2 ** (info.bits - 1)
    # Any bits; then fewer that are not finite, so that the first one lies anywhere, or nowhere.
    count = math.prod(shape)
    bits = data.draw(st.lists(st.integers(-half, half - 1), min_size=count, max_size=count))
    rows = torch.tensor(bits, dtype=BITS[dtype]).view(dtype).view(shape)
    finite = torch.tensor([0.0, -0.0, info.max, info.min, info.tiny, -1.5], dtype=dtype)
    drawn = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    kept = data.draw(st.sets(st.integers(0, count - 1), max_size=3))
    keep = torch.tensor([place in kept for place in range(count)]).view(shape)
    rows = torch.where(keep, rows, finite[drawn].view(shape))
    found = first_nonfinite(rows)
    assert (found and found[:2]) == brute_force(rows)
    assert found is None or not math.isfinite(found[2])


@given(
    dtype=st.sampled_from(list(BITS)),
    value=st.sampled_from([math.inf, -math.inf, math.nan, -math.nan]),
    place=st.integers(0, 4 * 3 * 5 - 1),
)
def test_one_bad_value_is_told_by_its_place_and_kind(
    dtype: torch.dtype, value: float, place: int
) -> None:
    rows = torch.full((4, 3, 5), torch.finfo(dtype).min, dtype=dtype)
    rows.view(-1)[place] = value
    row, column, found = first_nonfinite(rows) or (-1, -1, 0.0)
    assert (row, column) == (place // 15, place // 5 % 3)
    assert found == value or math.isnan(found) == math.isnan(value) is True


@pytest.mark.parametrize("bad", [False, True])
def test_nothing_of_the_size_of_the_rows_is_allocated(bad: bool) -> None:
    rows = torch.zeros(1024, 4, 1024, dtype=torch.bfloat16)
    if bad:
        rows[-1, -1, -1] = -math.inf
    tracemalloc.start()
    try:
        found = first_nonfinite(rows)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == ((1023, 3, -math.inf) if bad else None)
    assert peak_bytes < 64 * 1024
