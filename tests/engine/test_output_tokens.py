"""Rows for output tokens: prompt + output - 1, matched by token ids, at one stage and two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.harness import Arm, random_prompts
from stagetap import open_dataset
from stagetap.engine.environment import cores_by_rank

pytestmark = pytest.mark.engine

PROMPTS = random_prompts([1, 40, 130], seed=21)
LAYERS = [0, 2, 3, 6]

# name -> how to sample; each is run on every prompt.
CASES: dict[str, dict[str, Any]] = {
    "one": {"max_tokens": 1},
    "two": {"max_tokens": 2},
    "eight": {"max_tokens": 8},
    "eight-again": {"max_tokens": 8},  # over a cached prefix
    "min": {"max_tokens": 8, "min_tokens": 8},
    "penalty": {"max_tokens": 8, "repetition_penalty": 1.3, "temperature": 0.8, "seed": 5},
}


@pytest.fixture(scope="module")
def arms(checkpoint: Callable[..., str], stores: Callable[[str], Path]) -> dict[int, Any]:
    """What each arm answered, and its dataset, by stages."""
    found = {}
    for stages in (1, 2):
        store = stores(f"output-pp{stages}")
        arm = Arm(
            "engine.jobs:capture_outputs",
            {
                "model": checkpoint("llama"),
                "layers": LAYERS,
                "store": str(store),
                "pp": stages,
                "engine_args": {"skip_tokenizer_init": True, "max_num_batched_tokens": 64},
            },
            {"prompts": PROMPTS, "cases": CASES},
            # Attention on CPU splits its sums by threads: as many here as on each of two stages.
            {"VLLM_CPU_OMP_THREADS_BIND": cores_by_rank(1, of=2)} if stages == 1 else {},
        )
        found[stages] = (arm.run(), open_dataset(store, verify=True))
    return found


NAMES = [
    f"{case}-{number}" for case in (*CASES, "stop", "stop-early") for number in range(len(PROMPTS))
]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_for_every_token_that_ran(arms: dict[int, Any], name: str) -> None:
    answers, dataset = arms[2]
    answer, sample = answers[name], dataset[name]
    prompt = PROMPTS[int(name.rsplit("-", 1)[1])]
    assert sample.input_ids.tolist() == prompt + answer["tokens"][:-1]
    assert sample.manifest.token_count == len(prompt) + len(answer["tokens"]) - 1
    assert sample.manifest.prompt_token_count == len(prompt)
    for tensor in (sample.hidden_states, sample.last_hidden_states):
        assert tensor.shape[0] == sample.manifest.token_count


@pytest.mark.parametrize("name", NAMES)
def test_two_stages_are_bitwise_one(arms: dict[int, Any], name: str) -> None:
    assert arms[1][0][name] == arms[2][0][name]
    one, two = (arms[stages][1][name] for stages in (1, 2))
    assert torch.equal(one.hidden_states, two.hidden_states)
    assert torch.equal(one.last_hidden_states, two.last_hidden_states)


def test_a_stop_token_ends_the_rows_where_it_ends_the_request(arms: dict[int, Any]) -> None:
    answers, _ = arms[2]
    for number in range(len(PROMPTS)):
        free = answers[f"eight-{number}"]["tokens"]
        answer = answers[f"stop-{number}"]
        assert answer["reason"] == "stop"
        assert answer["tokens"] == free[: free.index(answer["stopped_by"]) + 1]
        # A stop token before min_tokens does not count.
        early = answers[f"stop-early-{number}"]
        assert len(early["tokens"]) >= 5
