"""What cannot be honoured is refused in the front end, by name and with a cure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import tiny_checkpoint
from engine.beside import connector_part, multi_connector
from engine.harness import TESTS, Arm, clean_environment, refusals
from engine.unpatched import unpatched_site
from stagetap.engine.scratch import PREFIX

pytestmark = pytest.mark.engine

GOOD: dict[str, Any] = {"layers": [2, 6, 0], "store": "/nowhere"}


def beside(other: dict[str, Any], first: bool = False, **options: Any) -> dict[str, Any]:
    """StageTap and another connector inside MultiConnector; the other one first or not."""
    transfer = multi_connector(GOOD["layers"], GOOD["store"], other)
    connectors = transfer["kv_connector_extra_config"]["connectors"]
    connectors[0]["kv_connector_extra_config"].update(options)
    if first:
        connectors.reverse()
    return transfer


ENCODER: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 6,
    "vocab_size": 100,
}

# name -> what differs from a good configuration, and what the refusal must name.
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "good": ({}, []),
    "misspelt option": ({"options": {**GOOD, "slotz": 4}}, ["'slotz'", "slots"]),
    "ill-typed option": ({"options": {**GOOD, "slots": "8"}}, ["slots", "int"]),
    "option out of range": ({"options": {**GOOD, "slots": 0}}, ["slots"]),
    "no store": ({"options": {"layers": [1]}}, ["store"]),
    "id above N": ({"options": {**GOOD, "layers": [2, 7]}}, ["7 is above 6"]),
    "id twice": ({"options": {**GOOD, "layers": [1, 1]}}, ["1 is asked for more than once"]),
    "no ids": ({"options": {**GOOD, "layers": []}}, ["layers is empty"]),
    "negative id": ({"options": {**GOOD, "layers": [-1]}}, ["-1 is negative"]),
    "bool": ({"options": {**GOOD, "layers": [True]}}, ["True is not a layer id"]),
    "string id": ({"options": {**GOOD, "layers": ["3"]}}, ["'3' is not a layer id"]),
    "chosen ids": ({"options": {**GOOD, "layers": "2, last"}}, []),
    "unknown choice": ({"options": {**GOOD, "layers": "eagle2"}}, ["'eagle2'", "eagle3"]),
    "shallow choice": ({"options": {**GOOD, "layers": "eagle3"}}, ["eagle3", "of 6 layers"]),
    "consumer": ({"transfer": {"kv_role": "kv_consumer"}}, ["kv_consumer", "kv_producer"]),
    "compiled": ({"engine": {"enforce_eager": False}}, []),
    "scheduler class": (
        {"engine": {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}},
        ["--scheduler-cls"],
    ),
    "worker class": (
        {"engine": {"worker_cls": "vllm.v1.worker.worker_base.WorkerBase"}},
        ["--worker-cls"],
    ),
    "speculative decoding": (
        {
            "engine": {
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 2,
                }
            }
        },
        ["--speculative-config"],
    ),
    # On CPU vLLM itself knows no sleep mode; elsewhere `test_a_worker_does_not_sleep` holds too.
    "sleep mode": ({"engine": {"enable_sleep_mode": True}}, ["leep mode"]),
    "offloading": ({"engine": {"kv_offloading_size": 1.0}}, ["drop --kv-offloading-size"]),
    "weight transfer": (
        {"engine": {"weight_transfer_config": {"backend": "nccl"}}},
        ["--weight-transfer-config"],
    ),
    "encoder": (
        {"config": ENCODER, "engine": {"pipeline_parallel_size": 1}},
        ["BertForMaskedLM generates no text", "decoder-only"],
    ),
    "pooling": ({"engine": {"runner": "pooling"}}, ["--runner generate"]),
    "data parallelism": ({"engine": {"data_parallel_size": 2}}, ["data_parallel_size"]),
    "decode context parallelism": (
        {"engine": {"decode_context_parallel_size": 2, "tensor_parallel_size": 4}},
        ["context parallelism", "decode_context_parallel_size"],
    ),
    "prefill context parallelism": (
        {"engine": {"prefill_context_parallel_size": 2}},
        ["prefill_context_parallel_size"],
    ),
    "a loading connector beside": (
        {"transfer": beside(connector_part("Loading", kv_role="kv_both"))},
        ["Loading", "kv_both", "no forward pass"],
    ),
    "a consuming connector beside": (
        {"transfer": beside(connector_part("Loading", kv_role="kv_consumer"))},
        ["kv_consumer"],
    ),
    "a connector without groups beside": (
        {"transfer": beside(connector_part("NoGroups"))},
        ["NoGroups", "KV cache groups"],
    ),
    "not the first of several": (
        {"transfer": beside(connector_part("Producing"), first=True)},
        ["must be the first"],
    ),
    "misspelt option beside others": (
        {"transfer": beside(connector_part("Producing"), slotz=4)},
        ["'slotz'"],
    ),
    "good beside others": ({"transfer": beside(connector_part("Producing"))}, []),
    "lora": ({"engine": {"enable_lora": True}}, ["--enable-lora"]),
    "more stages than layers": (
        {"engine": {"pipeline_parallel_size": 7}},
        ["7 pipeline stages", "6 decoder layers"],
    ),
    "a store that is something else": (
        {"options": {**GOOD, "store": str(Path(__file__).parent)}},
        ["holds other things"],
    ),
    "no weights": (
        {"engine": {"model": str(TESTS.parent / "configs" / "targets" / "qwen3-235b-a22b")}},
        ["qwen3-235b-a22b has no .safetensors file"],
    ),
    "another family": ({"family": "granite"}, []),
    "old runner": ({"environment": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, ["Model Runner V2"]),
}


@pytest.fixture(scope="module")
def found(
    checkpoint: Callable[..., str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str | None]:
    cases = []
    for changes, _ in CASES.values():
        if (config := changes.get("config")) is None:
            model = checkpoint(changes.get("family", "llama"))
        else:
            model = str(tmp_path_factory.mktemp("model"))
            Path(model, "config.json").write_text(json.dumps(config))
        engine = {
            "model": model,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
        }
        cases.append(
            {"options": GOOD, **changes, "engine": {**engine, **changes.get("engine", {})}}
        )
    environment = {"PYTHONPATH": str(TESTS / "faults")}
    answers = Arm("engine.jobs:refused_configurations", None, {"cases": cases}, environment).run()
    return dict(zip(CASES, answers, strict=True))


@pytest.mark.parametrize("name", list(CASES))
def test_refused_by_name(found: dict[str, str | None], name: str) -> None:
    _, named = CASES[name]
    refusal = found[name]
    if not named:
        assert refusal is None
        return
    assert refusal is not None, "it was accepted"
    assert "\n" not in refusal
    for part in named:
        assert part in refusal


def test_capture_with_an_unpatched_vllm_names_the_cure(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    site = unpatched_site(tmp_path / "site", shim=False)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6]}\n')
    command = [sys.executable, "-m", "stagetap", "capture", "--model", checkpoint("llama")]
    child = subprocess.run(
        [*command, "--prompts", prompts, "--out", tmp_path / "out", "--layers", "2,6", "--pp", "2"],
        env=clean_environment(PYTHONPATH=str(site)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 2, child.stderr
    (line,) = refusals(child.stderr)
    assert "stagetap patch apply" in line


def test_a_failed_start_ends_with_its_cause(tmp_path: Path) -> None:
    """What a worker raises, which vLLM's front end calls "see root cause above"."""
    folder = tiny_checkpoint("llama", tmp_path / "foreign")
    save_file({"foreign": torch.zeros(2)}, folder / "model.safetensors")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt_token_ids": [5, 6]}\n')
    command = [sys.executable, "-m", "stagetap", "capture", "--model", folder, "--json"]
    child = subprocess.run(
        [*command, "--prompts", prompts, "--out", tmp_path / "out", "--layers", "2,6", "--pp", "2"],
        env=clean_environment(TMPDIR=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (child.returncode, child.stdout) == (1, "")
    line = child.stderr.splitlines()[-1]
    assert line.startswith("stagetap: error: vLLM did not start: ValueError: ")
    assert "'foreign'" in line
    assert list(tmp_path.glob(f"{PREFIX}*")) == []


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--stagetap-layers", "2,9", "--stagetap-store", "{store}"], "9 is above 6"),
        (["--stagetap-layers", "2"], "--stagetap-store is missing"),
        (["--stagetap-layers", "2,x", "--stagetap-store", "{store}"], "'x' is no choice of layers"),
    ],
)
def test_plain_vllm_serve_prints_one_line_and_stops(
    checkpoint: Callable[..., str], tmp_path: Path, flags: list[str], named: str
) -> None:
    store = tmp_path / "store"
    command = [str(Path(sys.executable).with_name("vllm")), "serve", checkpoint("llama")]
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    child = subprocess.run(
        [*command, "--enforce-eager", *(flag.format(store=store) for flag in flags)],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode != 0
    (line,) = refusals(child.stderr)
    assert named in line
    assert not store.exists()


def test_stagetap_serve_exits_as_its_other_refusals_do(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "stagetap", "serve", checkpoint("llama"), "--layers", "2,6"]
    child = subprocess.run(
        [*command, "--store", tmp_path / "store", "--", "--enable-lora"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 2
    (line,) = refusals(child.stderr)
    assert "--enable-lora" in line
    assert "Traceback" not in child.stderr
