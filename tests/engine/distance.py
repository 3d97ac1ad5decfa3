"""How far the rows that were captured are from those that were expected."""

from __future__ import annotations

import torch


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected, both of one shape, in float64."""
    reference = expected.double()
    return float((found.double() - reference).norm() / reference.norm())
