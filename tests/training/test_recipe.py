"""The trainer of the shipped recipe, as speculators' own parser takes it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from stagetap.recipe.commands import store_uri, train_command
from stagetap.recipe.document import read_recipe
from training.command import train
from unit.recipe.recipes import DRAFT, TARGET, filled


@pytest.mark.slow
def test_speculators_takes_every_argument(tmp_path: Path) -> None:
    recipe = read_recipe(filled(), "recipe.yaml")
    program, command, *arguments = train_command(recipe, json.loads(DRAFT.read_text("utf-8")))
    assert (program, command) == ("stagetap", "train")
    ended = train(*arguments, "--dump-config", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    text = ended.stdout[ended.stdout.index("train:") :]
    values: dict[str, object] = {"speculator_type": None}
    sections = [yaml.safe_load(text)["train"]]
    while sections:
        for name, value in sections.pop().items():
            if isinstance(value, dict):
                sections.append(value)
            else:
                values[name] = value
    expected = {
        "speculator_type": "k3_dspark",
        "draft_config": str(DRAFT),
        "verifier_name_or_path": str(TARGET),
        "hidden_states_backend": "stagetap",
        "stagetap_store": store_uri(recipe),
        "stagetap_wait_s": 180.0,
        "stagetap_min_loss_tokens": 14,
        "stagetap_after_read": "remove",
        "epochs": 1,
        "fsdp_shard": True,
        "total_seq_len": 8192,
        "on_missing": "warn",
        "max_anchors": 512,
    }
    assert {name: values.get(name) for name in expected} == expected
