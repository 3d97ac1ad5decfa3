"""``stagetap doctor MODEL``: what vLLM's registry says of an architecture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import BertConfig

from stagetap.engine.environment import engine_environment
from stagetap.engine.registered import RUNS

pytestmark = pytest.mark.engine


def test_an_architecture_is_looked_up(checkpoint: Callable[..., str], tmp_path: Path) -> None:
    llama = checkpoint("llama")
    config = json.loads(Path(llama, "config.json").read_text())
    folders = {name: tmp_path / name for name in ("unknown-class", "unknown-type", "encoder")}
    for folder in folders.values():
        folder.mkdir()
    bert = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        architectures=["BertForMaskedLM"],
    )
    bert.save_pretrained(folders["encoder"])
    for name, changes in {
        "unknown-class": {"architectures": ["FooBarForCausalLM"]},
        "unknown-type": {"model_type": "foobar"},
    }.items():
        (folders[name] / "config.json").write_text(json.dumps({**config, **changes}))
    done = subprocess.run(
        [sys.executable, "-m", "stagetap.engine.registered", llama, *map(str, folders.values())],
        env={**os.environ, **engine_environment(1, 1)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    findings = [each for each in json.loads(done.stdout.splitlines()[-1]) if each["check"] == RUNS]
    known, no_class, no_type, encoder = findings
    assert (known["found"], known["cure"]) == ("LlamaForCausalLM generates text", None)
    assert "FooBarForCausalLM" in no_class["found"]
    assert "`foobar`" in no_type["found"]
    assert "You can update" not in no_type["found"]
    assert "encoder" in encoder["found"]
    assert all(each["cure"] for each in (no_class, no_type, encoder))


def test_layers_are_felt_though_weights_are_made_up(
    checkpoint: Callable[..., str],
) -> None:
    """What its layers add to the stream is felt in every tap but the embedding output."""
    done = subprocess.run(
        [sys.executable, "-m", "stagetap", "doctor", checkpoint("smollm2"), "--pp", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    taps = json.loads(done.stdout)["taps"]
    assert [tap["layer_id"] for tap in taps] == list(range(31))
    assert all(" + " in tap["captured"] for tap in taps[1:])
