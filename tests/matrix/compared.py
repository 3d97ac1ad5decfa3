"""What a comparison of two datasets says about a row: pure functions."""

from __future__ import annotations

from typing import Any

import torch

from stagetap.equivalence.compare import Comparison

SHOWN_FINDINGS = 3


def numbers_only(comparison: Comparison, samples: int) -> bool:
    """Whether the two sides differ in nothing but the values of hidden states."""
    return (
        not comparison.problems
        and comparison.samples == samples
        and all(each.metrics.bitwise for each in comparison.tensors if each.layer is None)
        and not comparison.hidden.unordered
    )


def relative_error(reference: Any, candidate: Any) -> float:
    """The largest ``|a - b| / |b|`` of a whole tensor ``[T, H]``, over all samples and layers."""
    errors = [0.0]
    for sample_id in candidate.sample_ids:
        ours, theirs = candidate[sample_id], reference[sample_id]
        for layer_id in ours.manifest.tapped.layer_ids:
            a, b = ours.layer(layer_id).double(), theirs.layer(layer_id).double()
            errors.append(float(torch.linalg.norm(a - b) / torch.linalg.norm(b)))
    return max(errors)


def findings(comparison: Comparison) -> str:
    """The first reasons why it is not bitwise, in one line."""
    found = list(comparison.findings())
    more = len(found) - SHOWN_FINDINGS
    return "; ".join(found[:SHOWN_FINDINGS]) + (f"; and {more} more" if more > 0 else "")
