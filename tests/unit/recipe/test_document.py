"""Reading a recipe: what is open, unknown, missing or of the wrong type is named."""

from __future__ import annotations

from typing import Any

import pytest

from stagetap.errors import Refused
from stagetap.recipe.document import OPEN, is_recipe, read_recipe
from stagetap.yaml_file import read_yaml_map
from unit.recipe.recipes import RECIPE, as_shipped, changed, filled

LEFT_OPEN = [
    *("target", "draft"),
    *(f"engines.nodes[{engine}][{node}]" for engine in range(2) for node in range(2)),
    *(f"trainer.nodes[{node}]" for node in range(4)),
    *("trainer.rows", "trainer.prompts", "trainer.save-path"),
]


def test_what_is_open_is_named() -> None:
    with pytest.raises(Refused) as refused:
        read_recipe(as_shipped(), "recipe.yaml")
    assert str(refused.value) == (
        f"recipe.yaml leaves {', '.join(LEFT_OPEN)} open (???): fill in what they are on your nodes"
    )
    with pytest.raises(Refused, match=r"leaves trainer\.rows open"):
        read_recipe(changed(trainer__rows=OPEN), "recipe.yaml")


def test_it_reads_what_is_filled_in() -> None:
    recipe = read_recipe(filled(), "recipe.yaml")
    assert (recipe.gpus, recipe.nodes) == (40, 8)
    assert recipe.store.segment_bytes == 512_000_000_000
    assert recipe.engine_nodes == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"engines__ppp": 2}, r"recipe.yaml: .*unknown field `ppp` - at `\$\.engines`"),
        ({"engines__pp": 0}, r"Expected `int` >= 1 - at `\$\.engines\.pp`"),
        ({"engines__tp": "8"}, r"Expected `int`, got `str` - at `\$\.engines\.tp`"),
        ({"engines__pp": -1}, r"Expected `int` >= 1"),
        ({"gpus": int("f" * 6000, 16)}, r"Expected `int` <= 2147483647 - at `\$\.gpus`"),
        ({"store__segment_bytes": 2**63}, r"Expected `int` <= .*segment-bytes"),
        ({"expected__tokens_in_flight": -5}, r"Expected `int` >= 1 .*tokens-in-flight"),
        ({"engines__max_num_seqs": 0}, r"Expected `int` >= 1 .*max-num-seqs"),
        ({"trainer__seed": -1}, r"Expected `int` >= 0 .*seed"),
        ({"trainer__train_data_ratio": float("nan")}, r"Expected `float`"),
        ({"stagetap_recipe": 2}, r"stagetap-recipe"),
        ({"engines__nodes": [[]]}, r"engines\.nodes is empty; name the address"),
        ({"trainer__nodes": []}, r"trainer\.nodes is empty"),
    ],
)
def test_what_is_no_recipe_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        read_recipe(changed(**changes), "recipe.yaml")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"trainer__rows": ""}, "trainer.rows is '';"),
        ({"trainer__rows": "--out"}, "trainer.rows is '--out';"),
        ({"trainer__save_path": " "}, "trainer.save-path is ' ';"),
        ({"trainer__prompts": "a\nb"}, "trainer.prompts is "),
        ({"target": "-t"}, "target is '-t';"),
        ({"store__run": ""}, "store.run is '';"),
        ({"trainer__rows": "/data/???/rows"}, "leaves trainer.rows open"),
        ({"engines__extra_args": ["--download-dir=???"]}, r"leaves engines.extra-args\[0\] open"),
        ({"trainer__nodes": ["localhost", "b"]}, "trainer.nodes: localhost is another one on each"),
        ({"trainer__nodes": ["LocalHost.localdomain"]}, "is another one on each node"),
        ({"trainer__nodes": ["0.0.0.0"]}, "0.0.0.0 is no one node for the others"),
        ({"engines__nodes": [["127.0.0.2"]]}, "engines.nodes: 127.0.0.2 is no one node"),
        ({"engines__nodes": [["::1"]]}, "::1 is no one node"),
        ({"engines__nodes": [["::"]]}, ":: is no one node"),
        ({"engines__nodes": [["::ffff:10.0.0.1"]]}, "is no plain address"),
        ({"engines__nodes": [["fe80::1%eth0"]]}, "is no plain address"),
        ({"engines__nodes": [["[fd00::1]"]]}, "IPv6 address without brackets"),
        ({"engines__nodes": [["127.1"]]}, "'127.1' is no name of a node"),
        ({"engines__nodes": [["a b"]]}, "'a b' is no name of a node"),
        ({"engines__nodes": [["--host"]]}, "'--host' is no name of a node"),
        ({"engines__nodes": [["node:80"]]}, "'node:80' is no name of a node"),
    ],
)
def test_what_no_command_can_take_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        read_recipe(changed(**changes), "recipe.yaml")


def test_a_missing_key_is_named() -> None:
    document = filled()
    del document["store"]["lease"]
    with pytest.raises(Refused, match=r"missing required field `lease` - at `\$\.store`"):
        read_recipe(document, "recipe.yaml")


def test_other_files_are_no_recipes() -> None:
    assert is_recipe(read_yaml_map(RECIPE))
    for serve_file in (RECIPE.parents[1] / "serve").glob("*.yaml"):
        assert not is_recipe(read_yaml_map(serve_file))
    assert not is_recipe(["stagetap-recipe"])
