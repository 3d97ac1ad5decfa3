"""Fixtures of the command-line tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tmpfs import mount_tmpfs as mount_tmpfs
from unit.cli.commands import Command, make_command


@pytest.fixture
def stagetap(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    """``stagetap``, run in an empty folder on a wide terminal."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("STAGETAP_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return make_command(monkeypatch, capfd)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that says what a checkpoint of 6 layers and hidden size 16 would say."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": 16,
        "vocab_size": 500,
        "max_position_embeddings": 64,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    weights = len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
    (folder / "model.safetensors").write_bytes(weights)
    return folder
