"""Running commands around training as their users do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine.harness import clean_environment

DSPARK = [
    *("--speculator-type", "dspark", "--num-layers", "1", "--full-attention-indices", "0"),
    *("--block-size", "3", "--markov-rank", "4", "--max-anchors", "8", "--mask-token-id", "511"),
    *("--target-layer-ids", "4", "2", "--draft-attn-impl", "sdpa", "--optimizer", "adamw"),
    *("--loss-implementation", "eager", "--total-seq-len", "16", "--num-workers", "0"),
]
"""A draft of one layer that reads the taps 4 and 2, trained on the CPU."""


def train(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """``stagetap train`` in a process of its own: what speculators reads once is read there."""
    return subprocess.run(
        [sys.executable, "-m", "stagetap", "train", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )


def stagetap(*arguments: object, **environment: str) -> dict[str, Any]:
    """What a command said, with its own environment."""
    child = subprocess.run(
        [sys.executable, "-m", "stagetap", *map(str, arguments), "--json"],
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, (child.stdout + child.stderr)[-6000:]
    return json.loads(child.stdout)


def metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a ``--stagetap-metrics`` file."""
    return [json.loads(line) for line in file.read_text().splitlines()]
