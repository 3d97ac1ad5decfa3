"""A server that is told to stop while it publishes, and another one on the same store."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.harness import TESTS, server, wait_for
from stagetap import open_dataset

pytestmark = pytest.mark.engine

PROMPT = [50, 426, 61]


def complete(
    client: httpx.Client, sample_id: str, prompt: Sequence[int] = PROMPT
) -> httpx.Response:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 2,
        "kv_transfer_params": {"stagetap": {"sample_id": sample_id}},
    }
    return client.post("/v1/completions", json=body)


def test_what_is_published_in_time_commits_and_the_rest_fails_by_name(
    checkpoint: Callable[..., str], stores: Callable[[str], Path], tmp_path: Path
) -> None:
    store, faults = stores("shutdown"), tmp_path / "faults"
    hung: list[dict[str, Any]] = [{"on": "write", "do": "hang", "stage": 1, "sample": "hung"}]
    slow = {"on": "write", "do": "delay", "seconds": 2.0, "sample": "slow"}
    faults.write_text(json.dumps([*hung, slow]))
    arguments = [
        *(checkpoint("llama"), "--layers", "0,6", "--store", str(store), "--pp", "2", "--"),
        *("--served-model-name", "tiny", "--skip-tokenizer-init", "--shutdown-timeout", "10"),
    ]
    environment = {"PYTHONPATH": str(TESTS / "faults"), "STAGETAP_FAULTS": str(faults)}
    log = tmp_path / "log"
    with server(arguments, environment, log) as running, ThreadPoolExecutor() as clients:
        assert complete(running.client, "before").status_code == 200
        # Without a tokenizer vLLM would run this one, and a stage would die of it.
        outside = complete(running.client, "outside", [5, 512])
        assert outside.status_code == 400
        assert "token id 512" in outside.json()["error"]["message"]
        sent = {
            name: clients.submit(complete, running.client, name)
            for name in ("slow", "hung-1", "hung-2")
        }
        wait_for(lambda: under_way(running.client) == 3)
        os.kill(running.process.pid, signal.SIGTERM)
        slow_answer = sent["slow"].result()
        assert slow_answer.status_code == 200, slow_answer.text
        for name in ("hung-1", "hung-2"):
            try:
                answer = sent[name].result()
            except httpx.TransportError:
                pass  # the front end may be gone before it can pass the answer on; the log has it
            else:
                assert answer.status_code == 500, answer.text
                assert repr(name) in answer.json()["error"]["message"]
            assert f"sample {name!r}: stages [1] did not publish" in log.read_text()
        assert "and the engine is shutting down" in log.read_text()
        running.process.wait(30)
    assert set(open_dataset(store, verify=True).sample_ids) == {"before", "slow"}

    faults.write_text("[]")
    with server(arguments, environment, tmp_path / "second") as running:
        for name in ("hung-1", "hung-2", "slow"):
            answer = complete(running.client, name)
            # Another run: the sample that was committed in the first one is no duplicate here.
            assert answer.status_code == 200, answer.text
    dataset = open_dataset(store, verify=True)
    assert len(dataset) == 5
    for sample in dataset:
        assert sample.input_ids.tolist() == PROMPT


def under_way(client: httpx.Client) -> int:
    lines = client.get("/metrics").text.splitlines()
    (line,) = (one for one in lines if one.startswith("stagetap_samples_under_way{"))
    return int(float(line.split()[-1]))
