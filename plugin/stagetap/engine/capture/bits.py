"""Comparing tensors bit for bit: pure functions."""

from __future__ import annotations

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit; a NaN equals itself."""
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    )


def has_equal_rows(value: torch.Tensor) -> bool:
    """Whether two rows of ``[rows, H]`` are equal."""
    equal = (value[:, None] == value[None]).all(-1)
    return int(equal.sum()) > value.shape[0]


def proves_something(value: torch.Tensor) -> bool:
    """Whether a tensor is finite and not all zero, so that being equal to it means something."""
    return bool(value.isfinite().all() and value.any())
