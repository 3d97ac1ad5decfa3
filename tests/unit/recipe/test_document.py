"""Reading a recipe: what is open, unknown, missing or of the wrong type is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stagetap.errors import Refused
from stagetap.recipe.document import OPEN, is_recipe, load_document, read_recipe
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
        ({"stagetap_recipe": 2}, r"stagetap-recipe"),
        ({"engines__nodes": [[]]}, r"engines\.nodes is empty; name the address"),
        ({"trainer__nodes": []}, r"trainer\.nodes is empty"),
    ],
)
def test_what_is_no_recipe_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        read_recipe(changed(**changes), "recipe.yaml")


def test_a_missing_key_is_named() -> None:
    document = filled()
    del document["store"]["lease"]
    with pytest.raises(Refused, match=r"missing required field `lease` - at `\$\.store`"):
        read_recipe(document, "recipe.yaml")


def test_other_files_are_no_recipes(tmp_path: Path) -> None:
    assert is_recipe(load_document(RECIPE))
    for serve_file in (RECIPE.parents[1] / "serve").glob("*.yaml"):
        assert not is_recipe(load_document(serve_file))
    assert not is_recipe(["stagetap-recipe"])
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [\n")
    with pytest.raises(Refused, match=r"broken\.yaml cannot be read .* give a file in YAML"):
        load_document(broken)
