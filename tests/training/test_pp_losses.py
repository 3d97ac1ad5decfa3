"""The number of pipeline stages changes nothing that a draft is trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import load_from_disk

from checkpoints import tiny_checkpoint
from engine.harness import random_prompts
from stagetap import open_dataset
from stagetap.engine.environment import BINDING_ENV, cores_by_rank
from training.command import DSPARK, metrics, stagetap, train

pytestmark = [pytest.mark.engine, pytest.mark.full]

EPOCHS = 3


def test_losses_are_those_of_one_stage_step_by_step(tmp_path: Path) -> None:
    target = tiny_checkpoint("llama", tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    lines = [
        {"id": f"p{position}", "prompt_token_ids": ids}
        for position, ids in enumerate(random_prompts([6 + n % 7 for n in range(20)]))
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    losses, weights, rows = {}, {}, {}
    for stages in (1, 2):
        folder = tmp_path / f"pp{stages}"
        folder.mkdir()
        captured = stagetap(
            *("capture", "--model", target, "--prompts", prompts, "--out", folder / "store"),
            *("--layers", "2,4,last", "--pp", stages, "--include-output", 24, "--in-flight", 1),
            *("--keep-free-mib", 0, "--engine-arg", "skip_tokenizer_init=true"),
            **{BINDING_ENV: cores_by_rank(stages, 2)},
        )
        assert captured["samples"] == len(lines)
        written = open_dataset(folder / "store")[0].manifest.fragments
        assert [fragment.stage for fragment in written] == list(range(stages))
        stagetap("rows", folder / "store", "--out", folder / "rows")
        rows[stages] = load_from_disk(folder / "rows").with_format(None)[:]
        ended = train(
            *DSPARK,
            *("--verifier-name-or-path", target, "--data-path", folder / "rows"),
            *("--hidden-states-backend", "stagetap", "--stagetap-store", folder / "store"),
            *("--epochs", EPOCHS, "--seed", 7, "--save-path", folder / "draft"),
            *("--total-seq-len", 64, "--stagetap-metrics", folder / "metrics"),
            cwd=folder,
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        steps = [line["train"] for line in metrics(folder / "metrics") if "train" in line]
        losses[stages] = steps
        weights[stages] = (folder / f"draft/{EPOCHS - 1}/model.safetensors").read_bytes()
    assert rows[1] == rows[2]
    assert sum(map(sum, rows[1]["loss_mask"])) == len(lines) * 23
    assert len({step["loss"] for step in losses[1]}) == len(losses[1]) > 10
    assert losses[1] == losses[2]
    assert weights[1] == weights[2]
