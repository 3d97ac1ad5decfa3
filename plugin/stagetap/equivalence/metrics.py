"""How far two tensors are apart: bit by bit, and in float64 numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

ROWS_AT_A_TIME = 1024

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Metrics:
    """The distance of two tensors of one shape and dtype.

    Attributes:
        elements: how many numbers were compared.
        differing: how many differ in at least one bit.
        max_abs: largest absolute difference.
        sum_abs: sum of the absolute differences.
        max_relative: over all rows, the largest ``|a - b|_2 / |b|_2`` with b the reference.
        max_ulp: largest distance in representable numbers of the dtype.
        unordered: elements that are NaN or infinite on one side only, or differently so; the other
            numbers leave them out.
    """

    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    sum_abs: float = 0.0
    max_relative: float = 0.0
    max_ulp: float = 0.0
    unordered: int = 0

    @property
    def bitwise(self) -> bool:
        """Whether every bit of every element is equal."""
        return self.differing == 0

    @property
    def mean_abs(self) -> float:
        """Mean absolute difference."""
        return self.sum_abs / self.elements if self.elements else 0.0


def measure(candidate: torch.Tensor, reference: torch.Tensor) -> Metrics:
    """Compare two tensors ``[T, ...]`` of one shape and dtype, in float64, some rows at a time."""
    return total(
        _measure_rows(candidate[start : start + ROWS_AT_A_TIME], reference[start:][:ROWS_AT_A_TIME])
        for start in range(0, candidate.shape[0], ROWS_AT_A_TIME)
    )


def total(parts: Iterable[Metrics]) -> Metrics:
    """The metrics of several tensors as if they were one."""
    found = list(parts)
    return Metrics(
        elements=sum(part.elements for part in found),
        differing=sum(part.differing for part in found),
        max_abs=max((part.max_abs for part in found), default=0.0),
        sum_abs=sum(part.sum_abs for part in found),
        max_relative=max((part.max_relative for part in found), default=0.0),
        max_ulp=max((part.max_ulp for part in found), default=0.0),
        unordered=sum(part.unordered for part in found),
    )


def relative_ulp(dtype: torch.dtype) -> float:
    """What one ULP is at most, relative to the number it belongs to."""
    return float(torch.finfo(dtype).eps)


def _measure_rows(candidate: torch.Tensor, reference: torch.Tensor) -> Metrics:
    bits = _BITS[candidate.element_size()]
    # Bits, not numbers: NaN equals itself, and 0.0 is not -0.0.
    candidate_bits = candidate.contiguous().view(bits)
    reference_bits = reference.contiguous().view(bits)
    differing = int((candidate_bits != reference_bits).sum())
    if differing == 0:
        return Metrics(elements=candidate.numel())
    if not candidate.is_floating_point():
        difference = (candidate.double() - reference.double()).abs()
        return Metrics(
            elements=candidate.numel(),
            differing=differing,
            max_abs=float(difference.max()),
            sum_abs=float(difference.sum()),
        )
    ordered = candidate.isfinite() & reference.isfinite()
    unordered = ~ordered & (candidate_bits != reference_bits)
    a = torch.where(ordered, candidate.double(), 0.0).flatten(1)  # [T, n]
    b = torch.where(ordered, reference.double(), 0.0).flatten(1)  # [T, n]
    difference = (a - b).abs()
    steps = _steps(_position(candidate_bits), _position(reference_bits))
    return Metrics(
        elements=candidate.numel(),
        differing=differing,
        max_abs=float(difference.max()),
        sum_abs=float(difference.sum()),
        max_relative=max(_relative(a, b)),
        max_ulp=float(torch.where(ordered, steps, 0.0).max()),
        unordered=int(unordered.sum()),
    )


def _relative(a: torch.Tensor, b: torch.Tensor) -> Iterator[float]:
    distances = torch.linalg.vector_norm(a - b, dim=1).tolist()
    for distance, norm in zip(distances, torch.linalg.vector_norm(b, dim=1).tolist(), strict=True):
        yield 0.0 if distance == 0 else distance / norm if norm else float("inf")


def _position(bits: torch.Tensor) -> torch.Tensor:
    """Where a number stands in the order of all numbers of its dtype, zero at 0; int64."""
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)


def _steps(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # The difference of two positions of unlike sign may not fit 64 bits.
    alike = (a < 0) == (b < 0)
    return torch.where(alike, (a - b).abs().double(), a.double().abs() + b.double().abs())
