"""Samples in memory, as a reader would return them, to be spoilt in every way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from stagetap.manifest import Tapped
from store_samples import LAYERS, states, tapped, token_ids

LENGTHS = {"one": 1, "seven": 7, "many": 33}


@dataclass(frozen=True)
class FakeManifest:
    sample_id: str
    tapped: Tapped


@dataclass(frozen=True)
class FakeSample:
    manifest: FakeManifest
    input_ids: torch.Tensor
    hidden_states: torch.Tensor
    last_hidden_states: torch.Tensor | None

    @property
    def layer_ids(self) -> tuple[int, ...]:
        return tuple(k for k in self.manifest.tapped.layer_ids if k != LAYERS)


class FakeDataset(dict[str, FakeSample]):
    """Samples by id."""

    @property
    def sample_ids(self) -> list[str]:
        return list(self)

    def spoil(self, sample_id: str, **changes: Any) -> None:
        self[sample_id] = replace(self[sample_id], **changes)


def make_sample(
    sample_id: str, tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16
) -> FakeSample:
    what = tapped(dtype=str(dtype).removeprefix("torch."))
    aux = [k for k in what.layer_ids if k != LAYERS]
    return FakeSample(
        manifest=FakeManifest(sample_id, what),
        input_ids=torch.from_numpy(token_ids(tokens, seed)),
        hidden_states=torch.stack([states(k, tokens, seed) for k in aux], dim=1).to(dtype),
        last_hidden_states=states(LAYERS, tokens, seed).to(dtype),
    )


def make_dataset(dtype: torch.dtype = torch.bfloat16) -> FakeDataset:
    """Three samples, the same ones every time."""
    return FakeDataset(
        {
            name: make_sample(name, tokens, seed, dtype)
            for seed, (name, tokens) in enumerate(LENGTHS.items())
        }
    )
