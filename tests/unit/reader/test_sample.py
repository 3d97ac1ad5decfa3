"""A sample is the same whatever the layout it was stored in."""

import itertools
import pickle
from collections.abc import Sequence

import pytest
import torch
import xxhash

from stagetap.errors import ChecksumMismatch, LayerNotTapped
from stagetap.manifest import Fragment
from stagetap.reader.sample import Sample, StageStates
from stagetap.stores.base import FragmentBytes, SampleRef
from store_samples import HIDDEN, LAYERS, manifest, owned, states, tapped, token_ids

TOKENS = 5
LAYOUTS = {
    "PP=1": ((0, 6),),
    "PP=2": ((0, 3), (3, 6)),
    "PP=3, a stage without layers": ((0, 2), (2, 2), (2, 6)),
    "PP=6": tuple((k, k + 1) for k in range(6)),
}
ASKED = [
    *itertools.permutations((0, 2, 4, 6)),
    (6,),
    (0,),
    (3,),
    (3, 6),
    (1, 2, 3),
    (3, 2, 1),
    (1, 3, 2, 6, 5),
    tuple(range(7)),
]


def make(asked: Sequence[int], pp_layers: Sequence[tuple[int, int]]) -> Sample:
    what = tapped(asked, pp_layers, dtype="float32")
    stages, fragments = [], []
    for stage in range(what.pp_size):
        layers = owned(what, stage)
        if not layers:
            continue
        tensor = torch.stack([states(layer.id, TOKENS) for layer in layers], dim=1)
        payload = bytearray(tensor.view(torch.uint8).numpy().tobytes())
        fragments.append(
            Fragment(
                stage=stage,
                layers=layers,
                path="p",
                dtype="float32",
                shape=(TOKENS, len(layers), HIDDEN),
                byte_size=len(payload),
                checksum=f"xxh3_64:{xxhash.xxh3_64_hexdigest(payload)}",
                file_bytes=None,
                input_ids=not fragments,
            )
        )
        stored = FragmentBytes(payload=memoryview(payload), input_ids=None)
        stages.append(StageStates(fragments[-1], stored))
    ref = SampleRef(run_id="r", sample_id="s", attempt="a")
    described = manifest(what, ref, fragments, TOKENS)
    return Sample(described, stages, torch.from_numpy(token_ids(TOKENS)))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_asked_order_comes_back_from_any_layout(layout: Sequence[tuple[int, int]]) -> None:
    for asked in ASKED:
        sample = make(asked, layout)
        aux = tuple(k for k in asked if k != LAYERS)
        assert sample.layer_ids == aux
        for last_first in (False, True):
            sample = make(asked, layout)
            last = sample.last_hidden_states if last_first else None
            hidden = sample.hidden_states
            last = sample.last_hidden_states if last is None else last
            assert hidden.shape == (TOKENS, len(aux), HIDDEN)
            for column, k in enumerate(aux):
                assert torch.equal(hidden[:, column], states(k, TOKENS)), (asked, k)
            if LAYERS in asked:
                assert last is not None
                assert torch.equal(last, states(LAYERS, TOKENS))
            else:
                assert last is None
        for k in asked:
            assert torch.equal(sample.layer(k), states(k, TOKENS))
        sample.verify()


def test_a_layer_is_a_view_and_assembling_copies_once() -> None:
    sample = make((2, 4), LAYOUTS["PP=2"])
    assert sample.layer(2).data_ptr() == sample.layer(2).data_ptr()
    assert sample.hidden_states is sample.hidden_states
    whole = make((2, 4), LAYOUTS["PP=1"])
    assert whole.hidden_states.data_ptr() == whole.layer(2).data_ptr()
    with_last = make((2, 4, 6), LAYOUTS["PP=1"])
    assert with_last.hidden_states.data_ptr() == with_last.layer(2).data_ptr()
    # Layers of one token lie together, so they can be flattened into one row without a copy.
    assert with_last.hidden_states.view(TOKENS, 2 * HIDDEN).shape == (TOKENS, 2 * HIDDEN)


@pytest.mark.parametrize("k", [1, 7, -1, "2", None])
def test_a_layer_that_was_not_tapped_is_named(k: object) -> None:
    with pytest.raises(LayerNotTapped, match=r"'s' holds no layer .*\[2, 4\]") as caught:
        make((2, 4), LAYOUTS["PP=2"]).layer(k)  # type: ignore[arg-type]
    assert caught.value.sample_id == "s"


def test_verify_sees_one_flipped_bit_and_names_the_stage() -> None:
    sample = make((2, 4), LAYOUTS["PP=2"])
    sample.layer(4).view(torch.int32)[3, 7] ^= 1
    with pytest.raises(ChecksumMismatch, match="sample 's' of run 'r', stage 1") as caught:
        sample.verify()
    assert (caught.value.stage, caught.value.layer) == (1, 4)


def test_a_sample_can_be_pickled_before_and_after_it_was_assembled() -> None:
    for assembled in (False, True):
        sample = make((4, 2, 6), LAYOUTS["PP=2"])
        if assembled:
            sample.hidden_states  # noqa: B018 -- assembles
        again = pickle.loads(pickle.dumps(sample))
        assert torch.equal(again.hidden_states, sample.hidden_states)
        assert torch.equal(again.input_ids, sample.input_ids)
        assert again.manifest == sample.manifest
        assert again.metadata == {"seed": 0}
    assert "stages=[0, 1]" in repr(sample)
