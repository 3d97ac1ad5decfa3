"""One engine in a process of its own: feeds it batches and says how long each took."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VOCABULARY = 49_000

MODES: dict[str, dict[str, Any] | None] = {
    "exporting": {},
    "not_exporting": None,
    "prefill_only": {"prefill_only": True},
}
"""What a request of a batch says to StageTap."""

CLIENTS = 32
CROWDS: dict[str, dict[str, Any] | None] = {
    "committed": {"completion": "committed"},
    "accepted": {"completion": "accepted"},
}
"""The same for clients that send one short prompt after the other."""


def main() -> None:
    """Run the measurement that the first argument describes in JSON; see ``EngineSpec``."""
    spec = json.loads(sys.argv[1])
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # Lets a function run in the workers.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if spec["clients"]:
        result = measure_latency(spec)
    else:
        result = measure_with_stagetap(spec) if spec["store"] else measure_plain(spec)
    Path(spec["result"]).write_text(json.dumps(result))


def measure_with_stagetap(spec: dict[str, Any]) -> dict[str, Any]:
    """Batches of every mode in turn, in one engine."""
    from stagetap.engine.session import CaptureSession

    with CaptureSession(
        spec["model"],
        layers=spec["layers"],
        store=spec["store"],
        pp=spec["pp"],
        engine_args=engine_args(),
    ) as session:
        engine = session._engine
        batches = Batches(spec)
        caches = engine.collective_rpc(tap_cache)
        rates: dict[str, list[float]] = {name: [] for name in MODES if name in spec["modes"]}
        for turn in range(spec["rounds"] + 1):
            # Who comes first changes, so that nobody profits from what another left behind.
            for name in sorted(rates, reverse=bool(turn % 2)):
                rate = timed_batch(engine, batches.next(), MODES[name])
                if turn:  # The first turn warms up.
                    rates[name].append(rate)
        crowds: dict[str, list[float]] = {name: [] for name in CROWDS if name in spec["modes"]}
        for turn in range(spec["rounds"]):
            for name in sorted(crowds, reverse=bool(turn % 2)):
                prompts = batches.crowd()
                crowds[name].append(timed_batch(engine, prompts, CROWDS[name], CLIENTS))
    return {**rates, **crowds, "tap_caches": caches}


def measure_plain(spec: dict[str, Any]) -> dict[str, Any]:
    """Batches in an engine that does not use StageTap."""
    from stagetap.engine.environment import engine_environment

    os.environ.update(engine_environment(spec["pp"], 1))
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=spec["model"],
        pipeline_parallel_size=spec["pp"],
        distributed_executor_backend="mp",
        enforce_eager=True,
        **engine_args(),
    )
    engine = LLMEngine.from_engine_args(arguments)
    batches = Batches(spec)
    rates = [timed_batch(engine, batches.next(), None) for _ in range(spec["rounds"] + 1)]
    engine.engine_core.shutdown()
    return {"plain": rates[1:]}


def measure_latency(spec: dict[str, Any]) -> dict[str, Any]:
    """From the answer to a prompt until a trainer has its sample, for each number of clients.

    Requests end with their prompt and wait for no commit: their answer comes when the last chunk of
    the prompt has been computed. Both processes read one clock.
    """
    from stagetap.engine.session import CaptureSession

    seconds: dict[str, list[float]] = {}
    with CaptureSession(
        spec["model"],
        layers=spec["layers"],
        store=spec["store"],
        pp=spec["pp"],
        engine_args=engine_args(),
    ) as session:
        batches = Batches(spec)
        # The first turn warms up both processes.
        for turn, clients in enumerate([spec["clients"][0], *spec["clients"]]):
            prompts = batches.sent_by(clients)
            command = [sys.executable, "-m", "bench.trainer", spec["store"], str(len(prompts))]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
                assert trainer.stdout is not None
                trainer.stdout.readline()  # it waits for samples
                answered = answer_times(session._engine, prompts, clients, f"{turn}/")
                arrived = json.loads(trainer.stdout.readline())
            if turn:
                seconds[str(clients)] = [arrived[name] - answered[name] for name in answered]
    return seconds


def answer_times(
    engine: Any, prompts: list[list[int]], clients: int, prefix: str
) -> dict[str, float]:
    """When each prompt was answered, by the id of its sample."""
    from vllm import SamplingParams

    waiting = [(f"{prefix}{number}", ids) for number, ids in enumerate(prompts)]
    answered: dict[str, float] = {}
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < clients:
            name, ids = waiting.pop(0)
            options = {"sample_id": name, "prefill_only": True, "completion": "accepted"}
            sampling = SamplingParams(
                max_tokens=1,
                detokenize=False,
                extra_args={"kv_transfer_params": {"stagetap": options}},
            )
            engine.add_request(name, {"prompt_token_ids": ids}, sampling)
            in_flight += 1
        for output in engine.step():
            if output.finished:
                in_flight -= 1
                answered[output.request_id] = time.monotonic()
    return answered


def engine_args() -> dict[str, Any]:
    """What both engines have in common."""
    return {"skip_tokenizer_init": True, "use_tqdm_on_load": False}


class Batches:
    """Batches of prompts that no prefix cache has seen."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._numbers = random.Random(spec["seed"])
        self._shape = (spec["prompts"], spec["tokens"])

    def next(self) -> list[list[int]]:
        """A batch like the last one, of other tokens."""
        return self._prompts(*self._shape)

    def crowd(self) -> list[list[int]]:
        """Several short prompts for each of the clients."""
        return self._prompts(4 * CLIENTS, self._shape[1] // 8)

    def sent_by(self, clients: int) -> list[list[int]]:
        """At least 64 prompts, several for each client."""
        return self._prompts(max(64, 4 * clients), self._shape[1] // 4)

    def _prompts(self, count: int, tokens: int) -> list[list[int]]:
        return [[self._numbers.randrange(VOCABULARY) for _ in range(tokens)] for _ in range(count)]


def timed_batch(
    engine: Any,
    prompts: list[list[int]],
    stagetap: dict[str, Any] | None,
    clients: int | None = None,
) -> float:
    """Prompt tokens per second, from the first request to the last final output.

    Args:
        stagetap: what the requests say to StageTap; None does not export.
        clients: requests in the engine at a time; default: all of them.
    """
    from vllm import SamplingParams

    extra = None if stagetap is None else {"kv_transfer_params": {"stagetap": stagetap}}
    wanted = (stagetap or {}).get("completion", "committed")
    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, extra_args=extra)
    waiting = list(enumerate(prompts))
    began = time.perf_counter()
    in_flight = 0
    while waiting or in_flight:
        while waiting and in_flight < (clients or len(prompts)):
            number, ids = waiting.pop(0)
            engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
            in_flight += 1
        for output in engine.step():
            if output.finished:
                in_flight -= 1
                outcome = (output.kv_transfer_params or {}).get("stagetap", {})
                if stagetap is not None and outcome.get("state") != wanted:
                    raise RuntimeError(f"a sample was not {wanted}: {outcome}")
    return sum(map(len, prompts)) / (time.perf_counter() - began)


def tap_cache(worker: Any) -> dict[str, Any]:
    """In a worker: the taps that it owns, and what its cache for them takes for one token."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from stagetap.engine.connector import stagetap_connector

    side = stagetap_connector(get_kv_transfer_group()).worker_side
    taps = list(side._capture.taps.layer_ids)
    if not taps:
        return {"taps": [], "bytes_per_token": 0}
    pages = side._pages
    tokens = len(pages.stripes[0]) * pages.block_size
    return {"taps": taps, "bytes_per_token": pages.nbytes / tokens}


if __name__ == "__main__":
    main()
