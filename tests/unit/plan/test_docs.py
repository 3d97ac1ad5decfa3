"""What docs/plan.md and docs/layers.md show is what the present code prints."""

from __future__ import annotations

from plan_docs import LAYERS, PLAN, rendered_layers, rendered_plan


def test_every_plan_in_the_docs_is_the_present_one() -> None:
    page = PLAN.read_text("utf-8")
    assert page.count("$ stagetap plan ") >= 4
    assert rendered_plan(page) == page, "run `./justw plan-docs`"


def test_the_table_of_keys_is_the_present_one() -> None:
    page = LAYERS.read_text("utf-8")
    assert "| `dflash_config.target_layer_ids` | 1 |" in page
    assert rendered_layers(page) == page, "run `./justw plan-docs`"
