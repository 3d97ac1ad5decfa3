"""Kimi-K3's two streams over pipeline stages: the right one, and bit for bit that of one stage.

A tiny model of KDA, MLA, latent experts and block attention residuals, in real vLLM on CPU, whose
kernels for GPUs are stood in for (``tests/shims/kimi_k3_on_cpu.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from engine.harness import TESTS, Arm, random_prompts
from stagetap import StreamMismatch, open_dataset
from stagetap.engine.environment import BINDING_ENV, cores_by_rank
from stagetap.equivalence.compare import compare_datasets
from stagetap.partition import PARTITION_ENV
from tiny_kimi_k3 import CONFIG, LAYERS, write_kimi_k3

pytestmark = pytest.mark.engine

MIXTURE, PREFIX_SUM = "attn_res_mixture", "prefix_sum"
EVERY_TAP = [8, 3, 0, 1, 2, 4, 5, 6, 7]  # N first: ids are given back as they were asked for
LENGTHS = (1, 7, 33, 129, 400)
PROMPTS = {f"length-{n}": p for n, p in zip(LENGTHS, random_prompts(LENGTHS), strict=True)}

CUTS = [
    pytest.param(MIXTURE, "4,4", id="mixture-4,4"),
    *(
        pytest.param(stream, cut, id=f"{stream}-{cut}", marks=pytest.mark.full)
        for stream, cut in [
            (PREFIX_SUM, "4,4"),
            # Boundaries where a block of three is whole, where one has begun, and before the last.
            (MIXTURE, "3,3,2"),
            (PREFIX_SUM, "3,3,2"),
            (MIXTURE, "1,6,1"),
            (PREFIX_SUM, "1,6,1"),
        ]
    ),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kimi_k3(tmp_path_factory.mktemp("kimi-k3"))


class Captured(NamedTuple):
    """What one engine gave: its dataset, and the log-probabilities of its prompts' tokens."""

    dataset: Any
    logprobs: dict[str, Any]
    store: Path


Run = Callable[[str, str], Captured]


@pytest.fixture(scope="module")
def captured(checkpoint: Path, stores: Callable[[str], Path]) -> Run:
    """Stream and layers of each stage -> what that engine gave, started once."""

    @cache
    def run(stream: str, partition: str) -> Captured:
        stages = len(partition.split(","))
        store = stores(f"k3-{stream}")
        session = {
            "model": str(checkpoint),
            "layers": EVERY_TAP,
            "store": str(store),
            "pp": stages,
            # vLLM has no prefix caching for KDA on CPU.
            "engine_args": {
                "max_num_seqs": 4,
                "enable_prefix_caching": False,
                "skip_tokenizer_init": True,
            },
        }
        environment = {
            "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": str(int(stream == MIXTURE)),
            "VLLM_KIMI_K3_GEMM_AR": "0",  # a kernel of NVIDIA's
            PARTITION_ENV: partition,
            # Equal shares of the cores: attention on CPU splits its sums by threads.
            BINDING_ENV: cores_by_rank(stages, max(stages, len(os.sched_getaffinity(0)))),
            "STAGETAP_SHIMS": "kimi-k3",
            "PYTHONPATH": os.pathsep.join([str(TESTS / "shims"), str(TESTS)]),
        }
        job = Arm("engine.jobs:capture_with_logprobs", session, {"prompts": PROMPTS}, environment)
        logprobs = job.run()
        return Captured(open_dataset(store, verify=True, stream=stream), logprobs, store)

    return run


@pytest.mark.parametrize(("stream", "partition"), CUTS)
def test_stages_give_what_one_stage_gives(captured: Run, stream: str, partition: str) -> None:
    one = captured(stream, str(LAYERS)).dataset
    several = captured(stream, partition).dataset
    comparison = compare_datasets(one, several, PROMPTS)
    assert comparison.bitwise, "\n".join(comparison.findings())
    for name, ids in PROMPTS.items():
        sample = several[name]
        assert sample.input_ids.tolist() == ids
        assert sample.layer_ids == (3, 0, 1, 2, 4, 5, 6, 7)
        assert sample.hidden_states.shape == (len(ids), 8, CONFIG["hidden_size"])
        assert sample.manifest.tapped.stream == stream
        ends = [end for _, end in sample.manifest.tapped.pp_layers]
        # The mixture at a boundary is the next stage's, everything else that of the stage before.
        moved = stream == MIXTURE
        bounds = [0, *(end if moved else end + 1 for end in ends[:-1]), LAYERS + 1]
        owned = [[layer.id for layer in part.layers] for part in sample.manifest.fragments]
        assert owned == [list(range(first, beyond)) for first, beyond in pairwise(bounds)]


def test_the_last_tap_of_the_mixture_is_what_the_head_reads(
    captured: Run, checkpoint: Path
) -> None:
    """``log_softmax(lm_head(norm(last)))`` gives the engine's own prompt log-probabilities."""
    dataset, logprobs, _ = captured(MIXTURE, "4,4")
    weights = load_file(checkpoint / "model.safetensors")
    gain, head = (weights[name].float() for name in ("model.norm.weight", "lm_head.weight"))
    compared = 0
    for name in PROMPTS:
        last = dataset[name].last_hidden_states.float()
        normed = last * torch.rsqrt(last.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"])
        ours = (normed * gain @ head.T).log_softmax(-1)
        for position, entries in enumerate(logprobs[name]):
            for token, logprob in entries.items():
                assert abs(ours[position, int(token)].item() - logprob) < 0.1
                compared += 1
    assert compared > 500


def test_another_stream_is_not_taken_for_it(captured: Run) -> None:
    with pytest.raises(StreamMismatch, match=MIXTURE):
        open_dataset(captured(MIXTURE, "4,4").store, stream=PREFIX_SUM)


@pytest.mark.full
def test_the_mixture_follows_from_the_prefix_sums(captured: Run, checkpoint: Path) -> None:
    """Each tap of one stream from the other's, with the consumer's weights out of the checkpoint.

    A block's state is the prefix sum where the block begins.
    """
    prefix = captured(PREFIX_SUM, "3,3,2").dataset
    mixed = captured(MIXTURE, "4,4").dataset
    weights = load_file(checkpoint / "model.safetensors")
    block = CONFIG["attn_res_block_size"]
    for name in PROMPTS:
        sums, ours = prefix[name], mixed[name]
        assert torch.equal(ours.layer(0), sums.layer(0))  # the embedding
        for tap in range(1, LAYERS + 1):
            consumer = (
                "model.output_attn_res" if tap == LAYERS
                else f"model.layers.{tap}.self_attention_res"
            )  # fmt: skip
            states = [sums.layer(start) for start in range(0, tap, block)]
            sources = torch.stack([*states, sums.layer(tap)], dim=1).double()
            gain, query = (
                weights[f"{consumer}_{part}.weight"].double().flatten() for part in ("norm", "proj")
            )
            rms = (sources.pow(2).mean(-1) + CONFIG["rms_norm_eps"]).sqrt()
            share = ((sources * gain * query).sum(-1) / rms).softmax(-1)
            expected = (share[..., None] * sources).sum(1)
            wrong = (ours.layer(tap).double() - expected).abs() / expected.abs().clamp_min(1)
            assert wrong.max() < 2**-7, (name, tap)  # the rounding to bfloat16
            assert not torch.equal(ours.layer(tap), sums.layer(tap)), (name, tap)
