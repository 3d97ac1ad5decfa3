"""Tiny checkpoints in which a wrong tap shows: layers matter, and nothing is one or zero."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import FAMILIES, tiny_checkpoint
from hugging_face import load_model, streams, text_inputs
from matrix.truth import Truth

pytestmark = pytest.mark.slow

CLEARLY = 0.1
M_PERTURB = -6  # of glibc's malloc.h
IDS = [(17 * number) % 470 + 5 for number in range(40)]


def norm_of_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().norm(dim=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_matter_and_no_weight_is_plain(family: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(family, tmp_path)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        values = tensor.float()
        assert values.isfinite().all(), name
        assert (values != 0).float().mean() > 0.5, name
        assert values.numel() == 1 or values.std() > 0, name
    found = streams(load_model(checkpoint), text_inputs(IDS))
    assert len(found) in (7, 9)
    for layer, (before, after) in enumerate(itertools.pairwise(found)):
        rounded = [each.to(torch.bfloat16) for each in (before, after)]
        moved = norm_of_rows(rounded[1].float() - rounded[0].float()) / norm_of_rows(rounded[0])
        assert moved.median() > CLEARLY, layer
        # Rows differ too: a tap that mixed tokens up would not go unnoticed.
        assert (after[0] - after[1]).norm() > CLEARLY * after[0].norm(), layer


@pytest.fixture
def fill_memory() -> Iterator[Callable[[int], object]]:
    """What glibc fills memory with before it hands it out."""
    set_option = ctypes.CDLL(None).mallopt
    yield lambda byte: set_option(M_PERTURB, byte)
    set_option(M_PERTURB, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_family_is_the_same_checkpoint(
    family: str, tmp_path: Path, fill_memory: Callable[[int], object]
) -> None:
    """Whatever was drawn before, and whatever lay in memory that nobody set."""
    made = []
    for byte in (85, 170):
        fill_memory(byte)
        torch.rand(byte)
        made.append(tiny_checkpoint(family, tmp_path / str(byte)) / "model.safetensors")
    assert made[0].read_bytes() == made[1].read_bytes()


def test_another_family_is_another_checkpoint(tmp_path: Path) -> None:
    made = [tiny_checkpoint(name, tmp_path / name) for name in ("llama", "mistral")]
    one, other = (folder / "model.safetensors" for folder in made)
    assert one.read_bytes() != other.read_bytes()


def test_a_truth_knows_its_own_layer(tmp_path: Path) -> None:
    class Sample:
        def __init__(self, layers: list[torch.Tensor]):
            self.layer = layers.__getitem__
            self.manifest = self
            self.tapped = self
            self.layer_ids = range(len(layers))

    checkpoint = tiny_checkpoint("granite", tmp_path)
    truth = Truth.of(checkpoint, torch.bfloat16, {"a": text_inputs(IDS)})
    assert 0.001 < truth.rounding < 0.05
    exact = [each.to(torch.bfloat16) for each in truth.streams["a"]]
    error, wrong = truth.error({"a": Sample(exact)})
    assert error < 0.005
    assert not wrong
    swapped = [*exact[:2], exact[3], exact[2], *exact[4:]]
    error, wrong = truth.error({"a": Sample(swapped)})
    assert error > CLEARLY
    assert [line.split(":")[0] for line in wrong] == ["layer 2", "layer 3"]
    spoilt = [*exact[:-1], torch.full_like(exact[-1], float("nan"))]
    assert truth.error({"a": Sample(spoilt)})[1]
