"""What the matrix captures, and how two datasets are judged."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import IMAGE_TOKENS, tiny_checkpoint
from matrix.compared import findings, numbers_only, relative_error
from matrix.prompts import LENGTHS, one_token_an_image, picture_prompt, text_prompts
from stagetap.equivalence.compare import compare_datasets
from unit.equivalence.samples import make_dataset

IMAGE = IMAGE_TOKENS["image_token_id"]


def test_text_prompts_are_the_same_each_time_and_name_no_image() -> None:
    first, second = text_prompts(512), text_prompts(512)
    assert [each.token_ids.tolist() for each in first] == [
        each.token_ids.tolist() for each in second
    ]
    assert tuple(len(each.token_ids) for each in first) == LENGTHS
    assert max(each.token_ids.max() for each in first) < min(IMAGE_TOKENS.values())
    assert max(each.token_ids.max() for each in text_prompts(49152)) > 512


def test_an_image_is_one_token_for_the_engine() -> None:
    assert one_token_an_image([5, IMAGE, IMAGE, IMAGE, 6, IMAGE]) == [5, IMAGE, 6, IMAGE]
    assert one_token_an_image([IMAGE, IMAGE]) == [IMAGE]
    assert one_token_an_image([1, 1, 2]) == [1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
def test_a_picture_prompt_has_all_its_image_tokens(family: str, tmp_path: Path) -> None:
    prompt, inputs = picture_prompt(tiny_checkpoint(family, tmp_path))
    count = prompt.token_ids.tolist().count(IMAGE)
    assert count == int(inputs["image_grid_thw"].prod()) // 4
    assert count > 4
    assert len(one_token_an_image(prompt.token_ids.tolist())) == len(prompt.token_ids) - count + 1


def test_only_numbers_may_differ_where_a_bound_allows_it() -> None:
    reference, candidate = make_dataset(), make_dataset()
    assert numbers_only(compare_datasets(reference, candidate), len(candidate))
    assert not numbers_only(compare_datasets(reference, candidate), len(candidate) + 1)
    states = candidate["many"].hidden_states.clone()
    states[0, 0] *= 2
    candidate.spoil("many", hidden_states=states)
    comparison = compare_datasets(reference, candidate)
    assert not comparison.bitwise
    assert numbers_only(comparison, len(candidate))
    assert "sample 'many'" in findings(comparison)
    candidate.spoil("many", hidden_states=states * float("nan"))
    assert not numbers_only(compare_datasets(reference, candidate), len(candidate))
    candidate.spoil("many", hidden_states=states, input_ids=candidate["many"].input_ids + 1)
    assert not numbers_only(compare_datasets(reference, candidate), len(candidate))


def test_a_relative_error_is_of_whole_tensors() -> None:
    class Samples(dict[str, Any]):
        sample_ids = ("a",)

    def dataset(*layers: torch.Tensor) -> Any:
        tapped = SimpleNamespace(layer_ids=range(len(layers)))
        manifest = SimpleNamespace(tapped=tapped)
        return Samples(a=SimpleNamespace(manifest=manifest, layer=layers.__getitem__))

    ones = torch.ones(4, 8)
    row = ones.clone()
    row[0] = 2  # one row of four is off by all of itself
    assert relative_error(dataset(ones, ones), dataset(ones, ones)) == 0
    assert relative_error(dataset(ones, ones), dataset(ones, row)) == pytest.approx(0.5)
