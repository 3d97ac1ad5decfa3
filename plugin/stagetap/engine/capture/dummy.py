"""Weights that vLLM makes up (``--load-format dummy``), so that layers do something to be seen.

They lie within 0.001 of zero, those of norms too. What a layer of such weights adds to the stream
is a ten-billionth of it, too little for the dtype of any model: two tensors that differ by a layer
have the same bits, and a check could not tell them apart.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

_FACTOR = 2.0**16
"""A power of two: weights are the very same when they are divided by it again."""


@contextmanager
def felt_layers(model: nn.Module, load_format: str) -> Iterator[None]:
    """Norms of a model with made-up weights are so much larger while the body runs."""
    norms = [] if load_format != "dummy" else list(_norm_weights(model))
    with torch.no_grad():
        for weight in norms:
            weight.mul_(_FACTOR)
    try:
        yield
    finally:
        with torch.no_grad():
            for weight in norms:
                weight.div_(_FACTOR)


def _norm_weights(model: nn.Module) -> Iterator[nn.Parameter]:
    seen: set[int] = set()
    for module in model.modules():
        weight = module._parameters.get("weight") if "Norm" in type(module).__name__ else None
        if weight is not None and weight.is_floating_point() and id(weight) not in seen:
            seen.add(id(weight))
            yield weight
