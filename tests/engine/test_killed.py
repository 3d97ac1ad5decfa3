"""Processes of an engine that are killed: nobody waits in the dark, and nobody is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.harness import TESTS, Arm, clean_environment, random_prompts
from stagetap import open_dataset

pytestmark = pytest.mark.engine


def session_of(checkpoint: Callable[..., str], store: Path) -> dict[str, Any]:
    return {
        "model": checkpoint("llama"),
        "layers": [0, 6],
        "store": str(store),
        "pp": 2,
        "engine_args": {"skip_tokenizer_init": True},
    }


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        (None, "ended without a word"),
        pytest.param(1, "died unexpectedly (exit code: -9)", marks=pytest.mark.full),
    ],
)
def test_a_killed_process_ends_the_capture(
    checkpoint: Callable[..., str], stores: Callable[[str], Path], worker: int | None, says: str
) -> None:
    store = stores("killed")
    prompts = {str(n): ids for n, ids in enumerate(random_prompts([20] * 50))}
    arm = Arm(
        "engine.jobs:outlive_engine",
        session_of(checkpoint, store),
        {"prompts": prompts} | {"worker": worker},
    )
    ended = arm.run()
    assert says in ended["error"]
    assert ended["seconds"] < 30
    committed = open_dataset(store, verify=True)
    assert set(ended["captured"]) <= set(committed.sample_ids) < set(prompts)
    for sample in committed:
        assert sample.input_ids.tolist() == prompts[sample.sample_id]


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_a_broken_invariant_ends_the_engine_at_once_and_loudly(
    checkpoint: Callable[..., str], stores: Callable[[str], Path], stage: int
) -> None:
    session = session_of(checkpoint, stores("broken")) | {"layers": [0, 2, 3, 6]}
    arm = Arm(
        "engine.jobs:outlive_broken_invariant",
        session,
        {"stage": stage},
        {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
    )
    ended = arm.run()
    assert ended["ended"].startswith("BrokenInvariant: ")
    assert ended["seconds"] < 30


@pytest.mark.full
def test_a_killed_front_end_takes_its_engine_along(
    checkpoint: Callable[..., str], stores: Callable[[str], Path], tmp_path: Path
) -> None:
    told = tmp_path / "pid"
    spec = {
        "job": "engine.jobs:tell_pids_and_wait",
        "session": session_of(checkpoint, stores("orphan")),
        "arguments": {"path": str(told)},
        "result": str(tmp_path / "never"),
    }
    front_end = subprocess.Popen(
        [sys.executable, "-m", "engine.arm", json.dumps(spec)],
        cwd=TESTS,
        env=clean_environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 240
        while not told.exists() or not told.read_text():
            assert front_end.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        engine = psutil.Process(int(told.read_text()))
        family = [engine, *engine.children(recursive=True)]
        assert len(family) >= 3, "an engine and two workers"
    finally:
        front_end.kill()
        front_end.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, [process.pid for process in alive]
    assert not os.listdir(Path(spec["session"]["store"]) / "nonces")
