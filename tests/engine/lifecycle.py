"""What the life-of-a-request tests do inside one engine: each scenario returns what it saw.

The engine core runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), the two stages in workers
of their own, so that the scheduler's tables can be looked at and not trusted.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from engine.harness import random_prompts
from stagetap import open_dataset
from stagetap.engine.connector import stagetap_connector
from stagetap.engine.session import CaptureSession
from stagetap.stores.base import SampleRef

NOBODY = SampleRef(run_id="", sample_id="", attempt="")
"""An attempt that does not exist; to drop it makes the engine take a step."""


@dataclass
class Ended:
    """How a request ended, and how long after its submission."""

    reason: str
    tokens: list[int]
    said: dict[str, Any]
    seconds: float

    @property
    def state(self) -> str | None:
        return self.said.get("state")


@dataclass
class Driver:
    """Steps an engine by hand."""

    session: CaptureSession
    store: Path
    fault_file: Path
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, Ended] = field(default_factory=dict)
    count: int = 0
    last_params: dict[str, Any] = field(default_factory=dict)  # kv_transfer_params of the last end

    @property
    def engine(self) -> Any:
        return self.session._engine

    @property
    def scheduler(self) -> Any:
        return self.engine.engine_core.engine_core.scheduler

    def faults(self, *faults: dict[str, Any]) -> None:
        """Switch to these faults."""
        fresh = self.fault_file.with_suffix(".new")
        fresh.write_text(json.dumps(faults))
        fresh.replace(self.fault_file)

    def submit(
        self,
        ids: list[int],
        sample_id: str | None = None,
        sampling: dict[str, Any] | None = None,
        **stagetap: Any,
    ) -> str:
        """Add a request, exporting when it has a sample id, and return its request id."""
        from vllm import SamplingParams

        self.count += 1
        request_id = f"r{self.count}"
        extra = None
        if sample_id is not None:
            extra = {"kv_transfer_params": {"stagetap": {"sample_id": sample_id, **stagetap}}}
        wanted = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, **(sampling or {})}
        self.started[request_id] = time.monotonic()
        # The engine gives its own name; the scheduler knows the request under that one.
        self.engine.add_request(
            request_id,
            {"prompt_token_ids": ids},
            SamplingParams(**wanted, extra_args=extra),
        )
        return request_id

    def request(self, request_id: str) -> Any:
        """The scheduler's own record of a request, None when it has none."""
        for name, request in self.scheduler.requests.items():
            if name.startswith(f"{request_id}-") or name == request_id:
                return request
        return None

    def step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                params = output.kv_transfer_params or {}
                said = params.get("stagetap", {})
                if said:
                    self.last_params = params
                done = output.outputs[0]
                self.ended[output.request_id] = Ended(
                    done.finish_reason,
                    list(done.token_ids),
                    said,
                    time.monotonic() - self.started[output.request_id],
                )

    def until(self, condition: Callable[[], Any], seconds: float = 60) -> None:
        """Step until something holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen"
            self.step()

    def wait(self, *request_ids: str, seconds: float = 60) -> list[Ended]:
        """Step until these requests have ended."""
        self.until(lambda: all(name in self.ended for name in request_ids), seconds)
        return [self.ended[name] for name in request_ids]

    def run(self, ids: list[int], sample_id: str | None = None, **changes: Any) -> Ended:
        """One request from start to end."""
        return self.wait(self.submit(ids, sample_id, **changes))[0]

    def abort(self, *request_ids: str) -> None:
        self.engine.abort_request(list(request_ids))

    def settle(self, seconds: float = 30) -> None:
        """Step until the scheduler and the workers have nothing left to do."""
        self.until(lambda: not self.scheduler.has_requests(), seconds)
        deadline = time.monotonic() + seconds
        while any(sum(tables.values()) for tables in self.state()["workers"]):
            assert time.monotonic() < deadline, self.state()
            self.scheduler_side._dropped.append(NOBODY)  # a step that only asks the workers
            self.until(lambda: not self.scheduler.has_requests(), seconds)

    @property
    def scheduler_side(self) -> Any:
        return stagetap_connector(self.scheduler.connector).scheduler_side

    def used_blocks(self) -> int:
        pool = self.scheduler.kv_cache_manager.block_pool
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one is vLLM's null block

    def state(self) -> dict[str, Any]:
        """Every table there is: all zero when nothing is under way."""
        from stagetap_faults import tables

        return {
            "used_blocks": self.used_blocks(),
            "requests": len(self.scheduler.requests),
            "withheld": len(self.scheduler._withheld),
            "scheduler": self.scheduler_side.tables(),
            "workers": self.engine.collective_rpc(tables),
        }

    def committed(self) -> set[str]:
        return set(open_dataset(self.store).sample_ids)


def leftovers(state: dict[str, Any]) -> dict[str, Any]:
    """What is not zero in a state."""
    flat = {
        **{name: state[name] for name in ("used_blocks", "requests", "withheld")},
        **state["scheduler"],
        **{
            f"worker {number} {name}": count
            for number, tables in enumerate(state["workers"])
            for name, count in tables.items()
        },
    }
    return {name: count for name, count in flat.items() if count}


def all_scenarios(session: CaptureSession, store: str, fault_file: str, names: list[str]) -> Any:
    """Run scenarios one after the other; name -> what it saw, with what it left behind."""
    driver = Driver(session, Path(store), Path(fault_file))
    seen: dict[str, Any] = {}
    for name in names:
        try:
            seen[name] = SCENARIOS[name](driver)
            driver.faults()
            driver.settle()
            seen[name]["left"] = leftovers(driver.state())
        except Exception:  # noqa: BLE001 -- the test of this scenario shows it
            seen[name] = {"broken": traceback.format_exc()}
            driver.faults()
    return json.loads(json.dumps(seen, default=asdict))


SHORT = random_prompts([20], seed=1)[0]


def completion(driver: Driver) -> Any:
    """`committed` waits for the commit, `accepted` does not."""
    driver.faults({"on": "commit", "do": "delay", "seconds": 1.0})
    found: dict[str, Any] = {}
    for kind in ("accepted", "committed"):
        ended = driver.run(SHORT, f"c-{kind}", completion=kind)
        found[kind] = {"ended": ended, "readable": f"c-{kind}" in driver.committed()}
    driver.until(lambda: not driver.scheduler.has_requests())
    found["afterwards"] = sorted(driver.committed())
    return found


FAILURES = (
    ("open", "raise", 0),
    ("write", "fail", 0),
    ("write", "raise", 1),
    ("finish", "fail", 1),
    ("commit", "fail", None),
    ("commit", "raise", None),
)


def failure(driver: Driver) -> Any:
    """A part fails: that request alone, with its cause; a retry succeeds."""
    found = {}
    for on, do, stage in FAILURES:
        name = f"f-{on}-{do}"
        fault = {"on": on, "do": do, "sample": name} | ({} if stage is None else {"stage": stage})
        driver.faults(fault)
        ordinary = driver.submit(SHORT)
        failing = driver.submit(SHORT, name)
        ended, beside = driver.wait(failing, ordinary)
        readable = name in driver.committed()
        driver.faults()
        retry = driver.run(SHORT, name)
        found[name] = {
            "ended": ended,
            "beside": beside,
            "readable": readable,
            "retry": retry,
            "retry_readable": name in driver.committed(),
        }
    return found


def every_third(driver: Driver) -> Any:
    """Every third write of a stage fails."""
    driver.faults({"on": "open", "do": "fail", "stage": 1, "every": 3})
    names = [f"third-{n}" for n in range(9)]
    prompts = random_prompts([70] * 9, seed=2)
    ended = driver.wait(*map(driver.submit, prompts, names))
    committed = driver.committed()
    return {
        "states": [one.state for one in ended],
        "agree": all((one.state == "committed") == (name in committed)
                     for name, one in zip(names, ended, strict=True)),
        "used_blocks": driver.used_blocks(),
    }  # fmt: skip


def hang(driver: Driver) -> Any:
    """A write hangs: its request fails in time, its pages come back, its slot does not yet."""
    driver.faults({"on": "write", "do": "hang", "stage": 1, "sample": "hung"})
    ended = driver.run(SHORT, "hung")
    driver.step()
    driver.step()
    held = driver.state()
    others = driver.run(SHORT, "beside-hung")
    driver.faults()
    driver.settle()
    late = "hung" in driver.committed()
    return {
        "ended": ended,
        "held": held,
        "others": others,
        "late": late,
        "retry": driver.run(SHORT, "hung"),
    }


def quarantine(driver: Driver) -> Any:
    """All writers of a stage hang: exporting is suspended until one returns."""
    driver.faults({"on": "write", "do": "hang", "stage": 0})
    names = [driver.submit(SHORT, f"q-{n}") for n in range(2)]
    hung = driver.wait(*names)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:  # ordinary requests make the engine step
        driver.run(SHORT)
    refused = driver.run(SHORT, "q-refused")
    ordinary = driver.run(SHORT)
    driver.faults()
    deadline = time.monotonic() + 20
    tries = 0
    while (after := driver.run(SHORT, "q-after")).state != "committed":
        tries += 1
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return {"hung": hung, "refused": refused, "ordinary": ordinary, "after": after, "tries": tries}


def breaker(driver: Driver) -> Any:
    """Three failures in a row open the breaker; a probe closes it."""
    driver.faults({"on": "write", "do": "fail", "stage": 0})
    failed = [driver.run(SHORT, f"b-{n}") for n in range(3)]
    refused = driver.run(SHORT, "b-refused")
    ordinary = driver.run(SHORT)
    driver.faults()
    still = driver.run(SHORT, "b-still")
    time.sleep(5.2)
    probe = driver.submit(SHORT, "b-probe")
    beside = driver.submit(SHORT, "b-beside")
    probed, turned_away = driver.wait(probe, beside)
    return {
        "failed": failed,
        "refused": refused,
        "ordinary": ordinary,
        "still": still,
        "probe": probed,
        "beside": turned_away,
        "after": driver.run(SHORT, "b-after"),
    }


def nonfinite(driver: Driver) -> Any:
    """A NaN in a tap fails the sample, by name."""
    from stagetap_faults import heal_stage, spoil_stage

    driver.engine.collective_rpc(spoil_stage, args=(0, float("nan")))
    spoilt = driver.run(random_prompts([90], seed=3)[0], "nan")
    driver.engine.collective_rpc(heal_stage)
    return {
        "spoilt": spoilt,
        "readable": "nan" in driver.committed(),
        "healed": driver.run(random_prompts([90], seed=4)[0], "nan"),
    }


def hung_commit(driver: Driver) -> Any:
    """A commit that does not return: nobody knows, and nobody is told otherwise."""
    driver.faults({"on": "commit", "do": "hang", "sample": "hung-commit"})
    ended = driver.run(SHORT, "hung-commit")
    again = driver.run(SHORT, "hung-commit")
    driver.faults()
    deadline = time.monotonic() + 20
    while "hung-commit" not in driver.committed():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {"ended": ended, "again": again, "third": driver.run(SHORT, "hung-commit")}


def hung_look(driver: Driver) -> Any:
    """The store does not even say whether a sample is there."""
    driver.faults({"on": "look", "do": "hang", "sample": "look-hung"})
    ended = driver.run(SHORT, "look-hung")
    refused = driver.run(SHORT, "look-refused")
    ordinary = driver.run(SHORT)
    driver.faults()
    deadline = time.monotonic() + 20
    while (after := driver.run(SHORT, "look-after")).state != "committed":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return {"ended": ended, "refused": refused, "ordinary": ordinary, "after": after}


def aborts(driver: Driver) -> Any:
    """Aborted while waiting, preempted, between chunks, while publishing, after the commit."""
    from vllm.v1.request import RequestStatus

    found: dict[str, Any] = {}
    long = random_prompts([100] * 8, seed=5)
    writing = {"max_tokens": 60, "ignore_eos": True}
    # Six prompts fill the cache; the last one to run is the first that vLLM preempts.
    running = [driver.submit(ids, sampling=writing) for ids in long[1:6]]
    preempted = driver.submit(long[0], "a-preempted", sampling=writing, include_output=True)
    waiting = driver.submit(long[6], "a-waiting")
    driver.until(lambda: driver.request(preempted).status == RequestStatus.RUNNING)
    found["waiting"] = driver.request(waiting).status == RequestStatus.WAITING
    driver.abort(waiting)
    driver.until(lambda: driver.request(preempted).status == RequestStatus.PREEMPTED)
    driver.abort(preempted, *running)
    driver.settle()

    chunked = driver.submit(random_prompts([240], seed=6)[0], "a-chunked")
    driver.until(lambda: (r := driver.request(chunked)) and 0 < r.num_computed_tokens < 240)
    driver.abort(chunked)
    driver.settle()

    driver.faults({"on": "write", "do": "delay", "seconds": 1.0})
    publishing = driver.submit(SHORT, "a-publishing")
    driver.until(lambda: driver.scheduler._withheld)
    driver.abort(publishing)
    driver.step()
    driver.step()
    driver.faults()
    driver.settle()

    committed = driver.submit(SHORT, "a-committed")
    driver.wait(committed)
    driver.abort(committed)
    driver.settle()
    found["committed"] = sorted(name for name in driver.committed() if name.startswith("a-"))
    found["ended"] = [name for name in (waiting, preempted, chunked, publishing)
                      if name in driver.ended]  # fmt: skip
    found["retry"] = driver.run(SHORT, "a-publishing")
    return found


def preemption(driver: Driver) -> Any:
    """Long requests in a cache too small for all of them: one right sample each."""
    prompts = random_prompts([100] * 8, seed=7)
    writing = {"max_tokens": 120, "ignore_eos": True}
    names = [f"p-{n}" for n in range(8)]
    sent = [
        driver.submit(ids, name, sampling=writing, include_output=True)
        for ids, name in zip(prompts, names, strict=True)
    ]
    preempted: set[str] = set()

    def all_done() -> bool:
        for name in sent:
            if (request := driver.request(name)) is not None and request.num_preemptions:
                preempted.add(name)
        return all(name in driver.ended for name in sent)

    driver.until(all_done, 180)
    for name, one in zip(names, sent, strict=True):
        assert driver.ended[one].state == "committed", (name, driver.ended[one].said)
    dataset = open_dataset(driver.store, verify=True)
    references = {}
    for name, ids, one in zip(names, prompts, sent, strict=True):
        whole = ids + driver.ended[one].tokens[:-1]
        assert dataset[name].input_ids.tolist() == whole, name
        driver.engine.reset_prefix_cache()  # else it would read what the request itself wrote
        driver.run(whole, f"ref-{name}")
    dataset.refresh()
    for name in names:
        references[name] = dataset[f"ref-{name}"].hidden_states.double()
    errors = {
        name: {
            other: relative_error(dataset[name].hidden_states.double(), reference)
            for other, reference in references.items()
        }
        for name in names
    }
    return {"preempted": len(preempted), "errors": errors}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected; both ``[T, L, H]``."""
    return float((found - expected).norm() / expected.norm())


def prefill_only(driver: Driver) -> Any:
    """Requests that only want their states: no logits, no token, the same rows."""
    from stagetap_faults import count_logits, logits_computed

    driver.engine.collective_rpc(count_logits)
    prompts = random_prompts([1, 7, 33, 130, 240], seed=8)
    driver.engine.reset_prefix_cache()
    references = [driver.run(ids, f"po-ref-{n}") for n, ids in enumerate(prompts)]
    before = driver.engine.collective_rpc(logits_computed)[-1]
    driver.engine.reset_prefix_cache()
    alone = [driver.run(ids, f"po-{n}", prefill_only=True) for n, ids in enumerate(prompts)]
    again = [
        driver.run(ids, f"po-again-{n}", prefill_only=True, sampling={"max_tokens": 50})
        for n, ids in enumerate(prompts)
    ]
    together = driver.wait(
        *(driver.submit(ids, f"po-all-{n}", prefill_only=True) for n, ids in enumerate(prompts))
    )
    logits = driver.engine.collective_rpc(logits_computed)[-1] - before
    writing = {"max_tokens": 30, "ignore_eos": True}
    wanted = driver.run(SHORT, sampling=writing).tokens
    generating = driver.submit(SHORT, sampling=writing)
    driver.step()
    mixed = [driver.submit(ids, f"po-mix-{n}", prefill_only=True) for n, ids in enumerate(prompts)]
    generated, *mixed_ended = driver.wait(generating, *mixed)
    for one in (*references, *alone, *again, *together, *mixed_ended):
        assert one.state == "committed", one
    dataset = open_dataset(driver.store, verify=True)

    def same(kind: str) -> list[bool]:
        return [
            torch.equal(
                dataset[f"po-{kind}{n}"].hidden_states, dataset[f"po-ref-{n}"].hidden_states
            )
            for n in range(len(prompts))
        ]

    def near(kind: str) -> float:
        return max(
            relative_error(
                dataset[f"po-{kind}{n}"].hidden_states.double(),
                dataset[f"po-ref-{n}"].hidden_states.double(),
            )
            for n in range(len(prompts))
        )

    return {
        "references": references,
        "ends": [*alone, *again, *together, *mixed_ended],
        "logits": logits,
        "same": same(""),
        "near": {kind: near(kind) for kind in ("again-", "all-", "mix-")},
        "rows": [dataset[f"po-mix-{n}"].manifest.token_count for n in range(len(prompts))],
        "generated_as_alone": generated.tokens == wanted,
    }


def many(driver: Driver) -> Any:
    """Five hundred requests, a third of them aborted on the way."""
    prompts = random_prompts([6] * 500, seed=9)
    sent = [driver.submit(ids, f"many-{n}", prefill_only=True) for n, ids in enumerate(prompts)]
    kept = [name for number, name in enumerate(sent) if number % 3]
    for number, name in enumerate(sent):
        if number % 3 == 0:
            driver.step()
            driver.abort(name)
    ended = driver.wait(*kept, seconds=300)
    return {"states": sorted({str(one.state) for one in ended}), "kept": len(kept)}


SCENARIOS: dict[str, Callable[[Driver], Any]] = {
    function.__name__: function
    for function in (
        completion,
        failure,
        every_third,
        hang,
        quarantine,
        breaker,
        nonfinite,
        hung_commit,
        hung_look,
        aborts,
        preemption,
        prefill_only,
        many,
    )
}
