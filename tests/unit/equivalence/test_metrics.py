"""The numbers: known distances, and nothing that differs goes unseen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagetap.equivalence.metrics import ROWS_AT_A_TIME, measure, relative_ulp, total

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_tensors(dtype: torch.dtype) -> None:
    states = torch.randn(5, 3, 4).to(dtype)
    found = measure(states, states.clone())
    assert found.bitwise
    assert (found.elements, found.max_abs, found.max_ulp, found.mean_abs) == (60, 0, 0, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_step_is_one_ulp(dtype: torch.dtype) -> None:
    reference = torch.ones(4, 8, dtype=dtype)
    candidate = reference.clone()
    candidate[2, 3] = 1 + relative_ulp(dtype)
    found = measure(candidate, reference)
    assert (found.differing, found.max_ulp) == (1, 1)
    assert found.max_abs == relative_ulp(dtype)
    assert found.mean_abs == relative_ulp(dtype) / 32
    assert found.max_relative == pytest.approx(relative_ulp(dtype) / math.sqrt(8))


def test_ulp_counts_through_zero() -> None:
    smallest = torch.tensor([[1]], dtype=torch.int16).view(torch.bfloat16)
    assert measure(smallest, -smallest).max_ulp == 2
    assert measure(-smallest, torch.zeros_like(smallest)).max_ulp == 1


def test_a_sign_of_zero_is_a_difference_of_no_size() -> None:
    found = measure(torch.zeros(1, 2), torch.tensor([[0.0, -0.0]]))
    assert not found.bitwise
    assert (found.differing, found.max_abs, found.max_ulp, found.unordered) == (1, 0, 0, 0)


def test_nan_equals_itself_and_nothing_else() -> None:
    reference = torch.tensor([[float("nan"), 1.0, float("inf")]])
    assert measure(reference, reference.clone()).bitwise
    found = measure(torch.tensor([[1.0, 1.0, float("-inf")]]), reference)
    assert (found.differing, found.unordered) == (2, 2)
    assert found.max_abs == 0


def test_a_row_of_zeros_that_should_be_is_infinitely_far() -> None:
    found = measure(torch.ones(1, 2), torch.zeros(1, 2))
    assert found.max_relative == float("inf")


def test_relative_is_of_the_worst_row() -> None:
    reference = torch.tensor([[1000.0, 0.0], [3.0, 4.0]])
    candidate = torch.tensor([[1000.0, 0.0], [3.0, 4.5]])
    assert measure(candidate, reference).max_relative == pytest.approx(0.1)


def test_integers() -> None:
    found = measure(torch.tensor([1, 2, 9]), torch.tensor([1, 2, 3]))
    assert (found.differing, found.max_abs, found.elements) == (1, 6, 3)


@pytest.mark.parametrize("row", [0, ROWS_AT_A_TIME - 1, ROWS_AT_A_TIME, 2 * ROWS_AT_A_TIME])
def test_no_row_is_left_out(row: int) -> None:
    reference = torch.zeros(2 * ROWS_AT_A_TIME + 1, 2)
    candidate = reference.clone()
    candidate[row, 1] = 2
    found = measure(candidate, reference)
    assert (found.differing, found.max_abs, found.elements) == (1, 2, reference.numel())


def test_a_strided_view_is_compared_by_its_own_elements() -> None:
    whole = torch.randn(6, 3, 4)
    assert measure(whole[:, 1], whole[:, 1].contiguous()).bitwise
    assert not measure(whole[:, 1], whole[:, 2]).bitwise


@given(st.integers(0, 2**16 - 1), st.integers(0, 15), st.integers(0, 7))
def test_any_flipped_bit_is_seen(pattern: int, bit: int, place: int) -> None:
    bits = torch.full((2, 4), pattern - 2**15, dtype=torch.int16)
    flipped = bits.clone()
    flipped.view(-1)[place] ^= (1 << bit) - (2**16 if bit == 15 else 0)
    found = measure(flipped.view(torch.bfloat16), bits.view(torch.bfloat16))
    assert found.differing == 1


def test_total_of_parts() -> None:
    one = measure(torch.ones(1, 2), torch.zeros(1, 2))
    none = measure(torch.ones(1, 2), torch.ones(1, 2))
    both = total([one, none])
    assert (both.elements, both.differing, both.mean_abs) == (4, 2, 0.5)
    assert total([]).bitwise
