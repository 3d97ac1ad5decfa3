"""Drives an engine by hand, step by step, and looks into every table it has.

The engine core must run in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), so that the scheduler's
tables can be looked at and not trusted; the stages are workers of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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

    def run_until_committed(self, ids: list[int], sample_id: str, seconds: float = 20) -> Ended:
        """The same request again and again until it commits; its last end."""
        deadline = time.monotonic() + seconds
        while (ended := self.run(ids, sample_id)).state != "committed":
            assert time.monotonic() < deadline, ended
            time.sleep(0.05)
        return ended

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
