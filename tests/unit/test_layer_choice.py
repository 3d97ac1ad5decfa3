"""Every way to write a choice of layers, the sources that it rests on, and every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.layer_choice import (
    DRAFT_KEYS,
    check_choice,
    choose_layers,
    draft_layer_ids,
    needs_model,
    read_draft,
    spread,
)


@pytest.mark.parametrize(
    ("choice", "layers", "ids"),
    [
        ("30, 2,15", 30, (30, 2, 15)),
        ([6, 0, 3], 6, (6, 0, 3)),
        ("last", 30, (30,)),
        ("2,15,last", 30, (2, 15, 30)),
        (" last , 0", 6, (6, 0)),
        ("eagle3", 30, (2, 15, 27, 30)),
        ("eagle3", 7, (2, 3, 4, 7)),
        ("dflash:1", 36, (19, 36)),
        ("dflash:2", 36, (2, 34, 36)),
        ("dspark:5", 36, (2, 10, 18, 26, 34, 36)),
    ],
)
def test_what_a_choice_means(choice: Any, layers: int, ids: tuple[int, ...]) -> None:
    assert choose_layers(choice, layers) == ids


@pytest.mark.parametrize(
    ("layers", "released"),
    [
        # deepseek-ai/DeepSpec: dflash_qwen3_8b and dspark_qwen3_4b, dflash_qwen3_14b.
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        # z-lab/dflash, tests/fixtures/dflash2-config.json.
        (52, [1, 13, 25, 37, 49]),
    ],
)
def test_the_spread_is_that_of_released_drafts(layers: int, released: list[int]) -> None:
    """They count layers from 0 and tap behind them."""
    assert [k - 1 for k in spread(layers, 5)] == released


@given(st.integers(5, 200), st.integers(1, 12))
def test_a_spread_is_ascending_or_refused(layers: int, count: int) -> None:
    if count > 1 and count - 1 > layers - 4:  # more ids than the layers 1 to N - 3
        with pytest.raises(Refused, match="too shallow"):
            choose_layers(f"dflash:{count}", layers)
        return
    ids = choose_layers(f"dflash:{count}", layers)
    assert len(ids) == count + 1
    assert list(ids) == sorted(set(ids))
    assert ids[-1] == layers


def test_what_needs_a_model() -> None:
    assert not needs_model("2,15")
    assert not needs_model("")
    for choice in ("last", "2,last", "eagle3", "./draft"):
        assert needs_model(choice)
        with pytest.raises(Refused, match="needs the model's number of layers"):
            choose_layers(choice, None)
    assert choose_layers("2,15", None) == (2, 15)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("", "layers is empty"),
        ("2,2", "2 is asked for more than once"),
        ("2,31", "31 is above 30"),
        ("-1,last", "-1 is negative"),
        ("last,30", "30 is asked for more than once"),
        ("last,last", "last is asked for more than once"),
        ("first", "'first' is no choice of layers; write ids between commas"),
        ("1.5", "'1.5' is no choice of layers"),
        ("2;3", "'2;3' is no choice of layers"),
        ("Last", "'Last' is no choice of layers"),
        ("2,,last", "'' is not a layer id"),
        ("eagle3,last", "eagle3 stands alone and has the last layer already"),
        ("2,dflash:5", "dflash:5 stands alone"),
        ("dflash", "'dflash' is no choice of layers"),
        ("dflash:", "dflash: needs the number of layers"),
        ("dspark:0", "dspark:0 needs the number of layers"),
        ("dspark:five", "dspark:five needs the number of layers"),
        ("dspark:28", "dspark:28 would tap"),
        ("./nowhere", "./nowhere cannot be read (No such file or directory)"),
        ("~nouser/x.json", "~nouser/x.json cannot be read"),
        ("x" * 5000 + ".json", "cannot be read (File name too long)"),
        ("./d2,6", "./d2 is followed by '6': behind a draft only `,last` may stand"),
        ("./d2,6,last", "./d2 is followed by '6'"),
        ("dflash:200", "would tap [2, "),
        ("dflash:9999", "would tap [2, "),
        ("٣", "'٣' is no choice of layers"),
        ("1_0", "'1_0' is not a layer id"),
        ("9" * 40, "is not a layer id"),
        (True, "must be a list"),
        (b"last", "must be a list"),
        (["last"], "'last' is not a layer id"),
    ],
)
def test_what_is_refused(choice: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        choose_layers(choice, 30)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("choice", ["first", "eagle3,last", "dflash:x", "last,last", "2,2,last"])
def test_what_no_model_makes_right_is_refused_without_one(choice: str) -> None:
    with pytest.raises(Refused):
        check_choice(choice)


@pytest.mark.parametrize("choice", ["2,last", "last", "eagle3", "dspark:5", "./draft,last", "2"])
def test_what_a_model_may_make_right_passes(choice: str) -> None:
    check_choice(choice)


# A draft's configuration -------------------------------------------------------------------


def draft(folder: Path, **config: Any) -> str:
    """A draft's folder, as one would write it on a command line."""
    (folder / "config.json").write_text(json.dumps(config))
    return f"{folder}/"


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}, (2, 15, 27)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 15]}}, (2, 15)),
        ({"eagle_config": {"layer_ids": [2, 15]}}, (2, 15)),
        ({"aux_hidden_state_layer_ids": [2, 15]}, (2, 15)),
        ({"dflash_config": {"target_layer_ids": [1, 29]}}, (2, 30)),
        ({"dflash_config": {"layer_ids": [1, 29]}}, (1, 29)),
        ({"dspark_target_layer_ids": [27, 28, 29]}, (28, 29, 30)),
        ({"dspark_target_layer_ids": [27, 28, 29], "model_type": "deepseek_v41"}, (27, 28, 29)),
        ({"target_layer_ids": [7, 1]}, (8, 2)),
        # DeepSpec writes -1 for the embedding output.
        ({"target_layer_ids": [-1, 9]}, (0, 10)),
        # What vLLM makes of a speculators checkpoint: both keys, one meaning.
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 15],
                "dflash_config": {"target_layer_ids": [1, 14], "mask_token_id": 5},
            },
            (2, 15),
        ),
        ({"target_layer_ids": [1, 9], "num_target_layers": 30}, (2, 10)),
        # K3's DSpark counts what it reads under that name, and names the depth elsewhere.
        (
            {
                "target_layer_ids": [1, 9],
                "num_target_layers": 2,
                "target_num_hidden_layers": 30,
            },
            (2, 10),
        ),
    ],
)
def test_each_key_has_its_offset(
    config: dict[str, Any], ids: tuple[int, ...], tmp_path: Path
) -> None:
    assert choose_layers(draft(tmp_path, **config), 30) == ids
    assert choose_layers(f"{tmp_path}/config.json", 30) == ids


def test_last_may_be_added_to_a_draft(tmp_path: Path) -> None:
    folder = draft(tmp_path, target_layer_ids=[1, 9])
    assert choose_layers(f"{folder},last", 30) == (2, 10, 30)
    assert choose_layers(f"{folder}config.json, last", 30) == (2, 10, 30)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "names no target layers; known keys are eagle_aux_hidden_state_layer_ids"),
        ({"target_layer_ids": []}, "target_layer_ids is [], no list of layers"),
        ({"target_layer_ids": "1,2"}, "target_layer_ids is '1,2', no list"),
        ({"target_layer_ids": [1, True]}, "target_layer_ids holds True"),
        ({"target_layer_ids": [-2]}, "target_layer_ids holds -2"),
        ({"eagle_aux_hidden_state_layer_ids": [-1]}, "holds -1"),
        ({"target_layer_ids": [30]}, "31 is above 30"),
        ({"target_layer_ids": [4, 4]}, "5 is asked for more than once"),
        (
            {"target_layer_ids": [1, 9], "eagle_aux_hidden_state_layer_ids": [1, 9]},
            "contradicts itself: eagle_aux_hidden_state_layer_ids means the ids [1, 9], "
            "target_layer_ids means [2, 10]",
        ),
        (
            {"target_layer_ids": [1, 9], "num_target_layers": 36},
            "made for a target of 36 layers, this model has 30",
        ),
        (
            {"target_layer_ids": [1, 9], "target_num_hidden_layers": 93},
            "made for a target of 93 layers",
        ),
        (
            {"target_layer_ids": [1, 9], "target_num_hidden_layers": "30"},
            "target_num_hidden_layers is '30', not a size",
        ),
        ({"target_layer_ids": [1, 9], "num_target_layers": [30]}, "num_target_layers is [30]"),
    ],
)
def test_drafts_that_are_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as refused:
        choose_layers(draft(tmp_path, **config), 30)
    assert said in str(refused.value)


def test_a_draft_is_held_against_a_target_that_is_known(tmp_path: Path) -> None:
    """As `stagetap doctor --config FILE --draft DRAFT` reads it."""
    folder = draft(tmp_path, target_layer_ids=[1, 9, 17, 25, 33], num_target_layers=36)
    with pytest.raises(Refused, match="made for a target of 36 layers, this model has 30"):
        read_draft(folder, 30)
    assert read_draft(folder, 36) == read_draft(folder, None) == (2, 10, 18, 26, 34)


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "[" * 100_000])
def test_files_that_are_no_draft(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(Refused, match=r"draft's config\.json"):
        choose_layers(f"{tmp_path}/config.json", 30)


def test_last_is_not_added_twice(tmp_path: Path) -> None:
    folder = draft(tmp_path, target_layer_ids=[1, 29])
    with pytest.raises(Refused, match="30 is asked for more than once"):
        choose_layers(f"{folder},last", 30)


@given(st.lists(st.integers(0, 92), min_size=1, unique=True), st.sampled_from(DRAFT_KEYS))
def test_every_key_moves_every_id_alike(layers: list[int], key: Any) -> None:
    config: Any = layers
    for name in reversed(key.path):
        config = {name: config}
    assert draft_layer_ids(config, "draft") == tuple(layer + key.offset for layer in layers)


def test_published_kimi_k3_draft(tmp_path: Path) -> None:
    """Inferact/Kimi-K3-DSpark names [2, 23, 47, 71, 89]: vLLM's ids are one more."""
    folder = draft(
        tmp_path,
        model_type="k3_dspark",
        target_layer_ids=[2, 23, 47, 71, 89],
        num_target_layers=5,
        target_num_hidden_layers=93,
    )
    assert choose_layers(f"{folder},last", 93) == (3, 24, 48, 72, 90, 93)


def test_repeated_layers_are_refused_without_a_target_and_the_file_is_named() -> None:
    with pytest.raises(Refused, match="the draft names ids that do not fit: 5 is asked for more"):
        draft_layer_ids({"target_layer_ids": [4, 4]}, "the draft")
