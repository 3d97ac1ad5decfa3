"""From an engine on two stages to a trainer in another process, through memory alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from engine.conftest import LENGTHS
from engine.harness import Arm, Server, random_prompts, server
from mooncake_here import require_mooncake
from mooncake_run import samples_in
from stagetap import open_dataset
from stagetap.engine.scheduler_side import SchedulerSide
from stagetap.errors import Refused
from stagetap.stores.mooncake_processes import Master
from store_samples import tapped

pytestmark = [pytest.mark.engine, pytest.mark.mooncake]

LAYERS = [6, 0, 3, 2, 4]


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    require_mooncake()
    with Master(lease_ms=500) as master:
        yield master


@pytest.mark.parametrize("direct_pages", ["auto", pytest.param("off", marks=pytest.mark.full)])
def test_what_a_trainer_consumes_is_bitwise_what_a_directory_holds(
    captured: Callable[..., Any], checkpoint: Callable[..., str], master: Master, direct_pages: str
) -> None:
    prompts = {f"n/{n}": ids for n, ids in zip(LENGTHS, random_prompts(LENGTHS), strict=True)}
    reference = captured("llama", prompts, LAYERS, pp=2)
    run = f"online-{direct_pages}"
    uri = f"mooncake://{master.address}/{run}?global_segment_size=64MiB&local_buffer_size=4MiB"
    found = Arm(
        "engine.mooncake_jobs:capture_and_consume",
        {
            "model": checkpoint("llama"),
            "layers": LAYERS,
            "store": uri,
            "pp": 2,
            "connector_options": {
                "slot_bytes": 64 * 1024,  # several parts for the longest
                "direct_pages": direct_pages,
            },
            "engine_args": {"skip_tokenizer_init": True},
        },
        {"prompts": prompts, "uri": uri, "reference": str(reference._reader._root)},
        {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
    ).run()
    # Pages of a new engine follow each other, so that none of its fragments needs a slot.
    assert found["from_pages"] == [direct_pages == "auto"] * 2
    parts = found["rounds"][0]["parts"]
    assert parts["n/400"] == (0 if direct_pages == "auto" else 5)
    assert direct_pages == "off" or set(parts.values()) == {0}
    for each in found["rounds"]:
        assert each["errors"] == dict.fromkeys(prompts)
        assert sorted(each["equal"]) == sorted(prompts)
        assert each["different"] == []
    assert list(found["first"].values()) == [None]
    assert f"is committed in run {run}" in next(iter(found["again"].values()))
    # What nobody consumed went with the memory that the workers had lent.
    assert {key.split("/")[1] for key in samples_in(master, run)} <= {"index", "n%2F1"}
    with pytest.raises(Refused, match="names no run"):
        open_dataset(f"mooncake://{master.address}")


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_master_an_engine_serves_ordinary_requests_at_their_pace(
    checkpoint: Callable[..., str], tmp_path: Path, end: signal.Signals
) -> None:
    """Exports beside them are answered by name, soon; also while the engine is told to stop."""
    require_mooncake()
    with Master() as own_master, ThreadPoolExecutor(32) as clients:
        uri = f"mooncake://{own_master.address}/run?global_segment_size=64MiB&rpc_timeout=3"
        arguments = [
            *(checkpoint("llama"), "--layers", "0,6", "--store", uri, "--pp", "1", "--"),
            *("--served-model-name", "tiny", "--skip-tokenizer-init", "--shutdown-timeout", "20"),
        ]
        with server(arguments, {}, tmp_path / "log") as running:
            assert complete(running, "before")[0] == 200
            assert complete(running)[0] == 200
            os.kill(own_master.pid, end)
            exports, ordinary = [], []
            for number in range(12):
                exports.append(clients.submit(complete, running, f"lost-{number}"))
                if number % 3 == 0:
                    ordinary.append(clients.submit(complete, running))
                time.sleep(0.2)
            for code, _, seconds in (one.result() for one in ordinary):
                assert code == 200
                assert seconds < 2
            for code, said, seconds in (one.result() for one in exports):
                assert code in (500, 503), said
                assert own_master.address in said
                assert seconds < 10
            code, said, seconds = complete(running, "suspended")
            assert code == 503
            assert "resumes by itself" in said
            assert seconds < 2
            if end == signal.SIGSTOP:
                os.kill(own_master.pid, signal.SIGCONT)
                deadline = time.monotonic() + 60
                while (answer := complete(running, "after"))[0] != 200:
                    assert time.monotonic() < deadline, answer
                    time.sleep(0.5)
                os.kill(own_master.pid, end)
                stopped = [clients.submit(complete, running, f"stopped-{n}") for n in range(4)]
                time.sleep(1)
                os.kill(running.process.pid, signal.SIGTERM)
                for code, said, _ in (one.result() for one in stopped):
                    assert code in (500, 503), said
                    assert own_master.address in said
                running.process.wait(60)
                os.kill(own_master.pid, signal.SIGCONT)


def complete(running: Server, sample_id: str | None = None) -> tuple[int, str, float]:
    """One prompt, exported when it has a sample id: status, body, and seconds that it took."""
    body: dict[str, Any] = {"model": "tiny", "prompt": [50, 426, 61], "max_tokens": 1}
    if sample_id is not None:
        body["kv_transfer_params"] = {"stagetap": {"sample_id": sample_id}}
    began = time.monotonic()
    answer: httpx.Response = running.client.post("/v1/completions", json=body)
    return answer.status_code, answer.text, time.monotonic() - began


def test_a_sample_that_no_segment_can_ever_hold_is_told_at_the_door() -> None:
    """Beyond 64 MiB of rows for two workers that lend 32 MiB each."""
    side: Any = SimpleNamespace(
        _config=SimpleNamespace(parallel_config=SimpleNamespace(world_size=2)),
        _options=SimpleNamespace(store="mooncake://h:1/r?global_segment_size=32MiB"),
        _tapped=tapped(),
    )
    row_bytes = 4 * 16 * 2 + 8
    most = 64 * 1024 * 1024 // row_bytes
    assert SchedulerSide._too_large(side, most) is None
    said = SchedulerSide._too_large(side, most + 1)
    assert said is not None
    assert "global_segment_size" in said
    for store in ("/directory", "mooncake://h:1/r?global_segment_size=0"):
        side._options = SimpleNamespace(store=store)
        assert SchedulerSide._too_large(side, 10**9) is None
