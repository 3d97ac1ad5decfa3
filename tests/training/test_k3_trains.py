"""Kimi-K3's draft, trained on what two stages of a tiny Kimi-K3 gave."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from safetensors import safe_open

from drafts.tiny_k3 import TINY
from engine.harness import TESTS, random_prompts
from stagetap import open_dataset
from stagetap.partition import PARTITION_ENV
from tiny_kimi_k3 import CONFIG, LAYERS, write_kimi_k3
from training.command import metrics, stagetap, train

pytestmark = [pytest.mark.engine, pytest.mark.full]

TAPS = [7, 4, 2]
"""In the draft's order; 4 is where the first stage ends, and its mixture the second one's."""

DRAFT = {
    **TINY,
    "model_type": "k3_dspark",
    "hidden_size": CONFIG["hidden_size"],
    "vocab_size": CONFIG["vocab_size"],
    "mask_token_id": CONFIG["vocab_size"] - 1,
    "target_layer_ids": [tap - 1 for tap in TAPS],
    "fc_norm": True,
}


def test_two_steps_from_two_stages(tmp_path: Path) -> None:
    target = write_kimi_k3(tmp_path / "target")
    draft = tmp_path / "draft.json"
    draft.write_text(json.dumps(DRAFT))
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt_token_ids": ids} for ids in random_prompts([12 + n % 9 for n in range(8)])]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    store, rows = tmp_path / "store", tmp_path / "rows"
    captured = stagetap(
        *("capture", "--model", target, "--prompts", prompts, "--out", store, "--pp", 2),
        *("--layers", f"{draft},last", "--keep-free-mib", 0),
        *("--engine-arg", "enable_prefix_caching=false"),
        VLLM_KIMI_K3_AUX_ATTN_RES_STREAM="1",
        VLLM_KIMI_K3_GEMM_AR="0",
        STAGETAP_SHIMS="kimi-k3",
        PYTHONPATH=os.pathsep.join([str(TESTS / "shims"), str(TESTS)]),
        **{PARTITION_ENV: "4,4"},
    )
    assert captured["layer_ids"] == [*TAPS, LAYERS]
    written = open_dataset(store, stream="attn_res_mixture")[0].manifest.fragments
    assert [[layer.id for layer in part.layers] for part in written] == [[2], [4, 7, 8]]
    stagetap("rows", store, "--out", rows, "--learn-from", "all")
    arguments = [
        *("--speculator-type", "k3_dspark", "--draft-config", draft, "--data-path", rows),
        *("--verifier-name-or-path", target, "--loss-fn", '{"ce": 0.1, "tv": 0.9}'),
        *("--draft-attn-impl", "sdpa", "--loss-implementation", "eager", "--optimizer", "adamw"),
        *("--total-seq-len", 48, "--max-anchors", 16, "--num-workers", 1, "--epochs", 1),
        # speculators would look for it in the target's tokenizer, which a tiny one has not.
        *("--mask-token-id", DRAFT["mask_token_id"]),
        *("--max-steps", 2, "--save-path", tmp_path / "draft"),
        *("--hidden-states-backend", "stagetap", "--stagetap-store", store),
        *("--stagetap-metrics", tmp_path / "metrics"),
    ]
    ended = train(*arguments, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    steps = [line["train"] for line in metrics(tmp_path / "metrics") if "train" in line]
    assert len(steps) == 2
    assert all(math.isfinite(step["loss"]) for step in steps)
    with safe_open(tmp_path / "draft/0/model.safetensors", "pt") as file:
        assert file.get_slice("context_proj.weight").get_shape() == [128, 3 * 128]
        assert "fc_norm.2.weight" in file.keys()  # noqa: SIM118
    saved = json.loads((tmp_path / "draft/0/config.json").read_text())
    assert (saved["model_type"], saved["target_layer_ids"]) == ("k3_dspark", [6, 3, 1])

    draft.write_text(json.dumps({**DRAFT, "fc_norm": False}))
    refused = train(*arguments, "--save-path", tmp_path / "other", cwd=tmp_path)
    assert refused.returncode == 2
    assert "'attn_res_mixture', this draft reads 'prefix_sum'" in refused.stderr
