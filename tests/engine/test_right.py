"""Captured states are right, not only equal: they are those of the model.

A real language model on two stages, against a Hugging Face forward of the same checkpoint in
float32, and against the engine's own prompt log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.harness import Arm
from stagetap import open_dataset
from stagetap.models import resolve_model

pytestmark = pytest.mark.engine

LAYERS = [30, 0, 2, 15, 16, 27]
TEXTS = {
    "weather": "The river had risen in the night, and by morning the lower road was under water.",
    "code": "def mean(values):\n    return sum(values) / len(values)\n\nprint(mean([1, 2, 4]))\n",
    "facts": "Paris is the capital of France. Rome is the capital of Italy. Berlin is the capital",
}
MARGIN = 10.0
"""A tap must be this many times closer to its own layer than to either neighbour."""


@pytest.fixture(scope="module")
def model() -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        resolve_model("smollm2"), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def prompts() -> dict[str, list[int]]:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve_model("smollm2"))
    return {name: tokenizer.encode(text) for name, text in TEXTS.items()}


@pytest.fixture(scope="module")
def run(prompts: dict[str, list[int]], stores: Callable[[str], Path]) -> Any:
    """The captured dataset, and the engine's prompt log-probabilities of the same requests."""
    store = stores("right")
    session = {
        "model": str(resolve_model("smollm2")),
        "layers": LAYERS,
        "store": str(store),
        "pp": 2,
        "engine_args": {"max_model_len": 512},
    }
    logprobs = Arm("engine.jobs:capture_with_logprobs", session, {"prompts": prompts}).run()
    return open_dataset(store, verify=True), logprobs


def hugging_face_streams(model: Any, ids: list[int]) -> list[torch.Tensor]:
    """The residual stream after 0, 1, ... N layers, un-normed, ``[T, H]`` each."""
    streams: list[torch.Tensor] = []

    def note(module: Any, args: Any, output: Any) -> None:
        streams.append((output[0] if isinstance(output, tuple) else output).reshape(len(ids), -1))

    handles = [layer.register_forward_hook(note) for layer in model.model.layers]
    with torch.no_grad():
        embedded = model.model.embed_tokens(torch.tensor([ids]))[0]
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return [embedded, *streams]


def test_each_tap_is_its_own_layer_and_neither_neighbour(
    run: Any, model: Any, prompts: dict[str, list[int]]
) -> None:
    dataset, _ = run
    for name, ids in prompts.items():
        streams = hugging_face_streams(model, ids)
        assert len(streams) == 31
        for layer in LAYERS:
            ours = dataset[name].layer(layer).float()

            def error(k: int, ours: torch.Tensor = ours, streams: Any = streams) -> float:
                # By row: a few tokens of this model have norms hundreds of times the others'.
                rows = (ours - streams[k]).norm(dim=1) / streams[k].norm(dim=1)
                return float(rows.median())

            own = error(layer)
            neighbours = [error(k) for k in (layer - 1, layer + 1) if 0 <= k <= 30]
            print(f"{name} tap {layer}: own {own:.4f}, nearest neighbour {min(neighbours):.4f}")
            assert own * MARGIN < min(neighbours), (name, layer, own, neighbours)
            assert own < 0.05, (name, layer, own)


def final_norm(model: Any, last: torch.Tensor) -> torch.Tensor:
    """The model's final RMS norm, rounded to bfloat16 once, as the engine's kernel rounds."""
    norm = model.model.norm
    wide = last.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return (scaled * norm.weight.float()).to(torch.bfloat16)


def test_the_last_state_gives_the_engines_own_logprobs(
    run: Any, model: Any, prompts: dict[str, list[int]]
) -> None:
    """bf16: mean error <= 0.02, and the same best token wherever it leads by more than 0.25.

    What error there is comes from two roundings: the engine norms the last sum before it is
    rounded to bfloat16, and rounds its logits to bfloat16.
    """
    dataset, logprobs = run
    head = model.lm_head.weight.to(torch.bfloat16)
    errors: list[float] = []
    for name, ids in prompts.items():
        with torch.no_grad():
            logits = final_norm(model, dataset[name].last_hidden_states) @ head.T
        ours = logits.float().log_softmax(-1)  # [T, vocab]
        for position, expected in enumerate(logprobs[name]):
            best = ours[position].topk(2).values
            top = max(expected, key=lambda token: expected[token])
            if best[0] - best[1] > 0.25:
                assert int(ours[position].argmax()) == int(top), (name, position)
            token = ids[position + 1]
            errors.append(abs(float(ours[position, token]) - expected[str(token)]))
    mean, largest = sum(errors) / len(errors), max(errors)
    print(f"log-probabilities: {len(errors)} compared, mean error {mean:.4f}, max {largest:.4f}")
    assert mean <= 0.02, (mean, largest)
