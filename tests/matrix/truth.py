"""How far a captured dataset is from a Hugging Face forward in float32, and from other layers.

What rounding alone does is not guessed but measured: transformers runs the same checkpoint in the
engine's dtype too, and an engine may be :data:`ROUNDING` times as far off as that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hugging_face import load_model, streams

ROUNDING = 2.0
NEAREST_LAYER = 2.0
"""Another layer must be this many times further off than the tap's own."""

Streams = Mapping[str, Sequence[torch.Tensor]]
"""Of every prompt at every layer id: sample id -> N + 1 tensors ``[T, H]``."""


@dataclass(frozen=True)
class Truth:
    """The streams in float32, and how far transformers in another dtype is from them."""

    streams: Streams
    rounding: float

    @classmethod
    def of(
        cls, checkpoint: Path, dtype: torch.dtype, inputs: Mapping[str, Mapping[str, Any]]
    ) -> Truth:
        """Run the checkpoint in transformers on each prompt, in float32 and in ``dtype``."""
        exact = _run(checkpoint, torch.float32, inputs)
        rounded = exact if dtype == torch.float32 else _run(checkpoint, dtype, inputs)
        errors = [
            _distance(ours.float(), theirs)
            for name, layers in exact.items()
            for ours, theirs in zip(rounded[name], layers, strict=True)
        ]
        return cls(exact, max(errors))

    def error(self, dataset: Any) -> tuple[float, list[str]]:
        """The largest error of all taps and prompts, and where a tap is not its own layer's.

        A tap's error is the median over tokens of ``|a - b| / |b|``: rows of a few tokens of a real
        model have norms hundreds of times the others', and a token that goes to another expert
        tells nothing about the tap.
        """
        errors, wrong = [0.0], []
        for name, expected in self.streams.items():
            sample = dataset[name]
            for layer_id in sample.manifest.tapped.layer_ids:
                ours = sample.layer(layer_id).float()
                own = _distance(ours, expected[layer_id])
                others = [_distance(ours, each) for k, each in enumerate(expected) if k != layer_id]
                errors.append(own)
                if not own * NEAREST_LAYER < min(others):
                    wrong.append(
                        f"sample {name!r}, layer {layer_id}: {own:.3g} from its own layer of the "
                        f"Hugging Face forward, {min(others):.3g} from another"
                    )
        return max(errors), wrong


def _run(checkpoint: Path, dtype: torch.dtype, inputs: Mapping[str, Mapping[str, Any]]) -> Streams:
    model = load_model(checkpoint, dtype)
    return {name: streams(model, given) for name, given in inputs.items()}


def _distance(ours: torch.Tensor, expected: torch.Tensor) -> float:
    rows = (ours - expected).norm(dim=1) / expected.norm(dim=1)  # [T]
    return float(rows.median())
