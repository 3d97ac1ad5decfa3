"""The files for ``vllm serve --config``: vLLM's own parser takes them, their settings agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.harness import Arm, clean_environment
from stagetap.options import connector_options

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "configs" / "serve"
LAYERS = [2, 15, 27, 30]


CAPTURE = "stagetap-layers: '2'\nstagetap-store: x\n"

# name -> what such a file says of a capture, and what its refusal names.
WRONG = {
    "misspelt": ("stagetap-layer: '2'\n", "stagetap-layer"),
    "id above N": ("stagetap-layers: '2,31'\nstagetap-store: x\n", "31 is above 30"),
    "no store": ("stagetap-layers: '2'\n", "stagetap-store is missing"),
    "ill-typed": ("stagetap-layers: '2'\nstagetap-store: x\nmax-num-seqs: few\n", "max-num-seqs"),
    "no YAML": ("stagetap-layers: [\n", "serve.yaml cannot be read"),
    "alias": ("a: &a [b]\nc: *a\n", "*a is an alias"),
    "two spellings": ("max-num-seqs: 4\nmax_num_seqs: 2\n", "'max-num-seqs' stands twice"),
    "asks for help": (f"{CAPTURE}help: true\n", "asks for help"),
    "a second file": (f"{CAPTURE}config: other.yaml\n", "no second file"),
    "another model": (f"{CAPTURE}hf-overrides: {{num_hidden_layers: 4}}\n", "hf-overrides makes"),
    "its path": (f"{CAPTURE}hf-config-path: x\n", "hf-config-path makes"),
    "replicas": (f"{CAPTURE}data-parallel-size: 2\n", "data_parallel_size > 1"),
    "contexts": (f"{CAPTURE}decode-context-parallel-size: 2\n", "context parallelism"),
    "no stage": (f"{CAPTURE}pipeline-parallel-size: 0\n", "pipeline-parallel-size is 0"),
    "less than none": (f"{CAPTURE}tensor-parallel-size: -2\n", "tensor-parallel-size is -2"),
    "no sequence": (f"{CAPTURE}max-num-seqs: 0\n", "max-num-seqs is 0"),
    "fewer than none": (f"{CAPTURE}max-num-seqs: -1\n", "max-num-seqs is -1"),
    "no length": (f"{CAPTURE}max-model-len: 0\n", "max-model-len"),
    "heads": (f"{CAPTURE}tensor-parallel-size: 2\n", "9 does not divide by tensor-parallel-size 2"),
    "stages": (f"{CAPTURE}pipeline-parallel-size: 31\n", "31 pipeline stages are more"),
    "positions": (f"{CAPTURE}max-model-len: 9000\n", "max-model-len 9000 is above the 8192"),
    "no context": (f"{CAPTURE}prefill-context-parallel-size: 0\n", "parallel-size is 0"),
    "small step": (
        f"{CAPTURE}max-num-seqs: 9\nmax-num-batched-tokens: 8\n",
        "max-num-batched-tokens is 8, max-num-seqs 9",
    ),
    "no such host": (f"{CAPTURE}node-rank: 1\n", "node-rank is 1, nnodes 1"),
    "hosts": (f"{CAPTURE}nnodes: 2\nmaster-addr: a\n", "nnodes is 2, more than"),
    "speculation": (f"{CAPTURE}spec-method: ngram\n", "drop --speculative-config"),
    "speculation in one": (
        f"{CAPTURE}speculative-config: {{method: ngram, num_speculative_tokens: 2}}\n",
        "drop --speculative-config",
    ),
    "adapters": (f"{CAPTURE}enable-lora: true\n", "drop --enable-lora"),
    "sleep": (f"{CAPTURE}enable-sleep-mode: true\n", "drop --enable-sleep-mode"),
    "other weights": (
        f"{CAPTURE}weight-transfer-config: {{backend: nccl}}\n",
        "drop --weight-transfer-config",
    ),
    "half steps": (f"{CAPTURE}ubatch-size: 2\n", "microbatching"),
    "offloading": (f"{CAPTURE}kv-offloading-size: 1\n", "drop --kv-offloading-size"),
    "pooling": (f"{CAPTURE}runner: pooling\n", "--runner generate"),
    "embeddings": (f"{CAPTURE}convert: embed\n", "--runner generate"),
    "scheduler": (f"{CAPTURE}scheduler-cls: a.B\n", "drop --scheduler-cls"),
    "worker": (f"{CAPTURE}worker-cls: a.B\n", "drop --worker-cls"),
    "no capture": ("max-num-seqs: 4\n", "captures nothing"),
}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    wrong = {name: text for name, (text, _) in WRONG.items()}
    arguments = {"folder": str(FOLDER), "wrong": wrong}
    return Arm("engine.jobs:serve_files", None, arguments).run()


@pytest.fixture
def parsed(found: dict[str, Any]) -> dict[str, Any]:
    return found["parsed"]


@pytest.mark.parametrize("name", WRONG)
def test_a_file_that_starts_no_capture_is_refused(found: dict[str, Any], name: str) -> None:
    assert WRONG[name][1] in found["refused"][name]


def test_every_file_is_a_capture_on_two_stages(parsed: dict[str, Any]) -> None:
    assert set(parsed) == {
        "two_stages.yaml",
        "two_hosts.yaml",
        "mooncake.yaml",
        "prefill_only.yaml",
    }
    for found in parsed.values():
        assert found["connector"] == "StageTapConnector"
        assert found["options"]["layers"] == LAYERS
        assert found["stages"] == 2
        connector_options(found["options"])


def test_each_file_means_what_its_name_says(parsed: dict[str, Any]) -> None:
    assert {name for name, found in parsed.items() if found["hosts"] == 2} == {"two_hosts.yaml"}
    stores = {name: found["options"]["store"] for name, found in parsed.items()}
    assert stores["two_stages.yaml"] == "dataset"
    assert stores["mooncake.yaml"].startswith("mooncake://127.0.0.1:50051/run-1?")
    assert parsed["prefill_only.yaml"]["options"]["export_default"] == "on"


def doctor(file: Path, *options: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, findings by their name, and stderr of ``stagetap doctor --config``."""
    command = [sys.executable, "-m", "stagetap", "doctor", "--json", "--config", str(file)]
    done = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    checks = json.loads(done.stdout)["checks"] if done.stdout else []
    return done.returncode, {each["check"]: each for each in checks}, done.stderr


def test_the_doctor_finds_the_mooncake_file_well() -> None:
    code, checks, stderr = doctor(
        FOLDER / "mooncake.yaml", "--lent", "2GiB", "--consume-time", "1min"
    )
    assert code == 0, stderr
    assert checks["memory and tokens in flight"]["found"].startswith("131,072 tokens of 4,616 B")
    assert checks["time until consumed"]["ok"]
    # The same run has loaded vLLM, as every doctor does unless told otherwise.
    assert checks["connector"]["found"].startswith("StageTapConnector is stagetap.")
    assert "TapWorker" in checks["pipeline stages"]["found"]
    assert checks["flags"]["found"].endswith("in the help of vllm serve")


def test_the_doctor_asks_the_class_of_a_k3_draft(tmp_path: Path) -> None:
    draft = tmp_path / "config.json"
    shape = json.loads((ROOT / "configs/drafts/kimi_k3_dspark_mla.json").read_text("utf-8"))
    taps = {"target_layer_ids": [1, 14, 26], "num_target_layers": 3}
    draft.write_text(json.dumps(shape | taps | {"markov_head_type": "gated"}))
    code, checks, _ = doctor(FOLDER / "two_stages.yaml", "--static", "--draft", str(draft))
    assert code == 1
    assert [name for name, each in checks.items() if not each["ok"]] == ["draft and trainer"]
    assert "markov_head_type is 'gated'" in checks["draft and trainer"]["found"]


def test_the_doctor_names_what_does_not_go_together(tmp_path: Path) -> None:
    draft = tmp_path / "config.json"
    draft.write_text(json.dumps({"eagle_aux_hidden_state_layer_ids": [2, 14, 27]}))
    options = (
        "--static",
        "--draft",
        str(draft),
        "--lent",
        "64MiB",
        "--lease",
        "20s",
        "--consume-time",
        "2min",
    )
    code, checks, _ = doctor(FOLDER / "mooncake.yaml", *options)
    assert code == 1
    assert {name for name, each in checks.items() if not each["ok"]} == {
        "layers and draft",
        "memory and tokens in flight",
        "lease and removal",
        "time until consumed",
    }
    assert checks["layers and draft"]["cure"] == "capture 2,14,27,30"
