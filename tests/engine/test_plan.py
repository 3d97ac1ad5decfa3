"""A plan against vLLM's own accounting: what workers of small models allocate, to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.harness import Arm
from stagetap.plan.parallel import Parallel
from stagetap.plan.read_model import read_model
from stagetap.plan.stages import make_plan

pytestmark = pytest.mark.engine

CHOICE, LAYERS = "0,2,3,4,last", [0, 2, 3, 4, 6]
BATCHED_TOKENS = 256


ALLOCATED = (
    # A model with experts first: under its configuration vLLM makes the groups that experts need.
    *("qwen3-moe", "qwen3-next", "deepseek-v3", "gpt-oss"),
    *("llama", "llama-int8", "mistral", "qwen2", "qwen3", "glm4", "granite", "gemma3"),
)


def test_weights_are_those_of_vllms_modules(checkpoint: Callable[..., str]) -> None:
    """Twelve families in one process, with no engine: their module trees on the meta device."""
    folders = {family: checkpoint(family) for family in ALLOCATED}
    allocated = Arm("engine.plan_jobs:module_bytes", None, {"folders": folders}).run()
    planned = {}
    for family, folder in folders.items():
        config = json.loads(Path(folder, "config.json").read_text())
        (stage,) = make_plan(read_model(config), [2], Parallel(pp=1, tp=1)).stages
        planned[family] = sum(stage.weight_bytes.values())
    assert planned == allocated


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3"])
def test_a_plan_is_what_the_workers_allocate(
    family: str, checkpoint: Callable[..., str], stores: Callable[[str], Path]
) -> None:
    folder = checkpoint(family)
    reported = Arm(
        "engine.plan_jobs:accounting",
        {
            "model": folder,
            "layers": CHOICE,  # the front end makes ids of it, which the workers report
            "store": str(stores(f"plan-{family}")),
            "pp": 2,
            "engine_args": {
                "skip_tokenizer_init": True,
                "max_num_batched_tokens": BATCHED_TOKENS,
            },
        },
        environment={"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
    ).run()
    config: dict[str, Any] = json.loads(Path(folder, "config.json").read_text())
    # Without chunked prefill, as MLA on CPU is, vLLM makes a step as long as a sequence.
    batched_tokens = reported[0]["batched_tokens"]
    plan = make_plan(
        read_model(config), LAYERS, Parallel(pp=2, tp=1), batched_tokens=batched_tokens
    )
    planned = [
        {
            "rank": stage.index,
            "weight_bytes": sum(stage.weight_bytes.values()),
            "kv_token_bytes": stage.kv_token_bytes,
            "tap_token_bytes": stage.tap_token_bytes,
            "capture_bytes": stage.capture_bytes,
            "layer_ids": list(stage.layer_ids),
            "batched_tokens": plan.batched_tokens,
            "budget_layers": [stage.kv_token_bytes / 3] * 3,
            "budget_tap": plan.model.hidden_size * plan.model.itemsize,
        }
        for stage in plan.stages
    ]
    assert planned == reported
