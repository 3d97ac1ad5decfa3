"""The comparison can fail: every way to spoil a dataset is seen, and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stagetap import open_dataset
from stagetap.equivalence.compare import TOLERATED_ULP, Comparison, compare_datasets
from stagetap.equivalence.metrics import relative_ulp
from store_samples import LAYERS, Engine, states, tapped, token_ids
from unit.equivalence.samples import LENGTHS, FakeDataset, FakeManifest, make_dataset, make_sample


def compare(candidate: FakeDataset, reference: FakeDataset | None = None) -> Comparison:
    return compare_datasets(reference or make_dataset(), candidate)


def only_finding(comparison: Comparison) -> str:
    assert not comparison.bitwise
    (finding,) = comparison.findings()
    return finding


def test_equal_datasets() -> None:
    found = compare(make_dataset())
    assert found.bitwise
    assert found.tolerable
    assert list(found.findings()) == []
    assert found.samples == 3
    assert len(found.tensors) == 3 * (4 + 1)
    assert found.hidden.elements == sum(LENGTHS.values()) * 4 * 16
    assert found.layer(LAYERS).elements == sum(LENGTHS.values()) * 16


def test_nothing_is_not_equal_to_nothing() -> None:
    found = compare_datasets(FakeDataset(), FakeDataset())
    assert not found.bitwise
    assert not found.tolerable
    assert list(found.findings()) == ["no sample was compared"]


def test_two_swapped_layers() -> None:
    spoilt = make_dataset()
    spoilt.spoil("seven", hidden_states=spoilt["seven"].hidden_states[:, [1, 0, 2]])
    found = compare(spoilt)
    assert not found.bitwise
    assert not found.tolerable
    first, second = found.findings()
    assert first.startswith("sample 'seven', layer 2: ")
    assert second.startswith("sample 'seven', layer 0: ")
    assert found.layer(4).bitwise


def test_a_dropped_row() -> None:
    spoilt = make_dataset()
    spoilt.spoil("many", last_hidden_states=spoilt["many"].last_hidden_states[:-1])
    assert only_finding(compare(spoilt)) == (
        "sample 'many', layer 6: bfloat16 [32, 16] where the reference has bfloat16 [33, 16]"
    )


def test_a_row_too_early() -> None:
    spoilt = make_dataset()
    states_of = spoilt["many"].hidden_states
    spoilt.spoil("many", hidden_states=states_of.roll(1, dims=0))
    assert len(list(compare(spoilt).findings())) == 3


@pytest.mark.parametrize("bit", [0, 7, 15])
def test_a_flipped_bit(bit: int) -> None:
    spoilt = make_dataset()
    spoilt["many"].hidden_states.view(torch.int16)[32, 2, 15] ^= (1 << bit) - 2**16 * (bit == 15)
    finding = only_finding(compare(spoilt))
    assert finding.startswith("sample 'many', layer 4: 1 of 528 elements differ")


def test_another_dtype() -> None:
    spoilt = make_dataset()
    spoilt.spoil("one", hidden_states=spoilt["one"].hidden_states.to(torch.float16))
    first, *others = compare(spoilt).findings()
    assert first == (
        "sample 'one', layer 2: float16 [1, 16] where the reference has bfloat16 [1, 16]"
    )
    assert len(others) == 2


@pytest.mark.parametrize("side", ["candidate", "reference"])
def test_a_dropped_sample(side: str, tmp_path: Path) -> None:
    for name in ("candidate", "reference"):
        engine = Engine(tmp_path / name)
        for sample_id in ("kept", "lost"):
            if (name, sample_id) != (side, "lost"):
                engine.export(sample_id)
        engine.close()
    found = compare_datasets(
        open_dataset(tmp_path / "reference"), open_dataset(tmp_path / "candidate")
    )
    assert "'lost'" in only_finding(found)
    assert found.samples == 1


def test_a_token_id() -> None:
    spoilt = make_dataset()
    ids = spoilt["seven"].input_ids.clone()
    ids[3] += 1
    spoilt.spoil("seven", input_ids=ids)
    found = compare(spoilt)
    assert only_finding(found) == "sample 'seven': input_ids: 1 of 7 differ"
    assert not found.tolerable


def test_another_order_of_layers() -> None:
    spoilt = make_dataset()
    for name in spoilt:
        manifest = FakeManifest(name, tapped(layer_ids=(0, 2, 4, 6)))
        spoilt.spoil(name, manifest=manifest)
    found = compare(spoilt)
    assert not found.bitwise
    assert not found.tensors
    assert "layer ids [0, 2, 4, 6] where the reference has [2, 0, 4, 6]" in next(found.findings())


def test_a_last_layer_that_is_not_returned() -> None:
    spoilt = make_dataset()
    spoilt.spoil("one", last_hidden_states=None)
    assert only_finding(compare(spoilt)) == "sample 'one', layer 6: the reader returns no states"


def test_zeros_on_both_sides_prove_nothing() -> None:
    both = [make_dataset(), make_dataset()]
    for dataset in both:
        for sample in dataset.values():
            sample.hidden_states[:, 1] = 0
    assert only_finding(compare(*both)) == (
        "layer 0: all zeros in every sample: nothing was captured"
    )


def test_prompts_are_held_against_what_was_asked_for() -> None:
    prompts = {
        name: token_ids(tokens, seed).tolist()
        for seed, (name, tokens) in enumerate(LENGTHS.items())
    }
    assert compare_datasets(make_dataset(), make_dataset(), prompts).bitwise
    prompts["seven"][0] += 1
    found = compare_datasets(make_dataset(), make_dataset(), prompts)
    assert only_finding(found) == "sample 'seven': input_ids do not begin with the prompt"


def test_only_the_asked_samples_are_compared() -> None:
    more = make_dataset()
    more["other"] = make_sample("other", 5, seed=9)
    asked = {"one": token_ids(1, 0).tolist()}
    found = compare_datasets(more, make_dataset(), asked)
    assert found.bitwise
    assert found.samples == 1


@pytest.mark.parametrize(("steps", "tolerable"), [(1, True), (2, True), (3, False)])
def test_the_tolerance_is_two_ulp_of_a_row(steps: int, tolerable: bool) -> None:
    reference, candidate = make_dataset(), make_dataset()
    reference.spoil("one", last_hidden_states=torch.ones(1, 16, dtype=torch.bfloat16))
    off = torch.ones(1, 16) * (1 + steps * relative_ulp(torch.bfloat16))
    candidate.spoil("one", last_hidden_states=off.to(torch.bfloat16))
    found = compare(candidate, reference)
    assert not found.bitwise
    assert found.tolerable is tolerable
    assert found.hidden.max_ulp == steps
    assert TOLERATED_ULP == 2


def test_nan_on_one_side_is_never_tolerable() -> None:
    spoilt = make_dataset()
    spoilt["many"].hidden_states[0, 0, 0] = float("nan")
    found = compare(spoilt)
    assert not found.tolerable
    assert "1 NaN or infinite" in only_finding(found)


def test_real_stores_of_one_two_and_three_stages(tmp_path: Path) -> None:
    layouts = {"1": [(0, 6)], "2": [(0, 3), (3, 6)], "3": [(0, 1), (1, 4), (4, 6)]}
    for name, pp_layers in layouts.items():
        engine = Engine(tmp_path / name, tapped(pp_layers=pp_layers))
        for seed, (sample_id, tokens) in enumerate(LENGTHS.items()):
            engine.export(sample_id, tokens, seed)
        engine.close()
    reference = open_dataset(tmp_path / "1")
    for name in ("2", "3"):
        found = compare_datasets(reference, open_dataset(tmp_path / name))
        assert found.bitwise
        assert len(found.tensors) == 15
    assert torch.equal(reference["many"].layer(4), states(4, 33, 2).bfloat16())


def test_a_damaged_sample_is_named_with_its_stage(tmp_path: Path) -> None:
    for name in ("reference", "candidate"):
        engine = Engine(tmp_path / name)
        made = engine.export("broken")
        engine.export("whole", 5, seed=1)
        engine.close()
    (tmp_path / "candidate" / made.fragments[1].path).unlink()
    found = compare_datasets(
        open_dataset(tmp_path / "reference"), open_dataset(tmp_path / "candidate")
    )
    finding = only_finding(found)
    assert "'broken'" in finding
    assert "stage 1" in finding
    assert found.samples == 1
