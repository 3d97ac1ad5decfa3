"""How far a captured dataset is from a Hugging Face forward in float32, and from other layers.

What rounding alone does is not guessed but measured: transformers runs the same checkpoint in the
engine's dtype too, over an fp8 KV cache when the engine has one, and an engine may be
:data:`ROUNDING` times as far off as that.
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
    """The streams in float32, and how far transformers in another dtype is from them.

    Attributes:
        streams: what is right.
        rounding: the largest error of transformers itself.
        every_token: whether an error is that of the worst token, and not the median.
    """

    streams: Streams
    rounding: float
    every_token: bool

    @classmethod
    def of(
        cls,
        checkpoint: Path,
        dtype: torch.dtype,
        inputs: Mapping[str, Mapping[str, Any]],
        *,
        fp8_cache: bool = False,
    ) -> Truth:
        """Run the checkpoint in transformers on each prompt, in float32 and as the engine rounds.

        Args:
            checkpoint: what is run.
            dtype: that the engine computes in.
            inputs: of each prompt.
            fp8_cache: whether its KV cache holds fp8.
        """
        exact = _run(checkpoint, torch.float32, inputs)
        rounded = exact
        if dtype != torch.float32 or fp8_cache:
            rounded = _run(checkpoint, dtype, inputs, fp8_cache=fp8_cache)
        errors = [
            float(_row_errors(ours.float(), theirs).median())
            for name, layers in exact.items()
            for ours, theirs in zip(rounded[name], layers, strict=True)
        ]
        return cls(exact, max(errors), every_token=dtype == torch.float32)

    def error(self, dataset: Any) -> tuple[float, list[str]]:
        """The largest error of all taps and prompts, and where a tap is not its own layer's.

        A token's error is ``|a - b| / |b|``. In float32 a tap has that of its worst token; with
        rounding, the median over a prompt's tokens: rows of a few tokens of a real model have norms
        hundreds of times the others', and a token that goes to another expert tells nothing about
        the tap. Which layer a tap is nearest to is told by the
        median over the tokens of all prompts: what a first token hands on hardly changes from one
        layer of a real model to the next, and rounding alone may exceed that.
        """
        errors = [0.0]
        rows: dict[int, list[torch.Tensor]] = {}  # by id: of every prompt, [N + 1, T]
        for name, expected in self.streams.items():
            sample = dataset[name]
            for layer_id in sample.manifest.tapped.layer_ids:
                ours = sample.layer(layer_id).float()
                found = torch.stack([_row_errors(ours, each) for each in expected])
                own = found[layer_id]
                errors.append(float(own.max() if self.every_token else own.median()))
                rows.setdefault(layer_id, []).append(found)
        wrong = []
        for layer_id, found_rows in rows.items():
            layers = torch.cat(found_rows, dim=1).median(dim=1).values  # [N + 1]
            near = float(layers[layer_id])
            other = float(torch.cat([layers[:layer_id], layers[layer_id + 1 :]]).min())
            if not near * NEAREST_LAYER < other:
                wrong.append(
                    f"layer {layer_id}: {near:.3g} from its own layer of the Hugging Face forward, "
                    f"{other:.3g} from another"
                )
        return max(errors), wrong


def _run(
    checkpoint: Path,
    dtype: torch.dtype,
    inputs: Mapping[str, Mapping[str, Any]],
    *,
    fp8_cache: bool = False,
) -> Streams:
    model = load_model(checkpoint, dtype, fp8_cache=fp8_cache)
    return {name: streams(model, given) for name, given in inputs.items()}


def _row_errors(ours: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """``|a - b| / |b|`` of every token, ``[T]``."""
    return (ours - expected).norm(dim=1) / expected.norm(dim=1)
