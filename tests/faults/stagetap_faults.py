"""A vLLM plugin for tests: faults at the edge of the store, and eyes inside the workers.

The engine tests put this folder on PYTHONPATH, so vLLM loads it in each of its processes. It wraps
what `stagetap.stores.base` opens. The faults are read from the JSON file that STAGETAP_FAULTS
names, at every call, so that a test can switch them while the engine runs:

    [{"on": "write", "do": "fail", "stage": 1, "every": 3}]

`on`: open, write, finish (of a fragment), look (for a commit) or commit. `do`: fail (a StoreError),
raise (anything else), hang (until the fault is gone) or delay (`seconds`). `stage`: one stage, else
all. `every`: only each n-th call. `sample`: only samples whose id starts so.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stagetap.errors import StoreError
from stagetap.manifest import Manifest
from stagetap.stores import base

FAULTS_ENV = "STAGETAP_FAULTS"
ASYNC_ENV = "STAGETAP_TEST_ASYNC"
POLL_SECONDS = 0.02

_calls: Counter[str] = Counter()


def register() -> None:
    """The plugin's entry point."""
    if FAULTS_ENV in os.environ and base.open_store_writer.__module__ != __name__:
        base.open_store_writer = _wrapped(base.open_store_writer, FaultyWriter)
        base.open_store_committer = _wrapped(base.open_store_committer, FaultyCommitter)
    if ASYNC_ENV in os.environ:
        _let_cpu_schedule_asynchronously()


def _wrapped(opens: Callable[..., Any], kind: type) -> Callable[..., Any]:
    def opened(uri: Any) -> Any:
        return kind(opens(uri))

    return opened


def _faults(on: str, stage: int | None, sample: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(Path(os.environ[FAULTS_ENV]).read_text() or "[]")
    except FileNotFoundError:
        return []
    return [
        fault
        for fault in found
        if fault["on"] == on
        and fault.get("stage") in (None, stage)
        and sample.startswith(fault.get("sample", ""))
    ]


def _strike(on: str, stage: int | None, sample: str) -> None:
    for fault in _faults(on, stage, sample):
        key = json.dumps(fault, sort_keys=True)
        _calls[key] += 1
        if _calls[key] % fault.get("every", 1):
            continue
        if fault["do"] == "fail":
            raise StoreError(f"injected: {on} failed")
        if fault["do"] == "raise":
            raise ZeroDivisionError(f"injected: {on} raised")
        if fault["do"] == "delay":
            time.sleep(fault["seconds"])
        while fault["do"] == "hang" and fault in _faults(on, stage, sample):
            time.sleep(POLL_SECONDS)


class FaultyWriter:
    """A store writer whose fragments meet the faults."""

    def __init__(self, store: Any):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open_fragment(self, header: base.FragmentHeader) -> Any:
        _strike("open", header.stage, header.ref.sample_id)
        return FaultyFragment(self._store.open_fragment(header), header)


class FaultyFragment:
    """A fragment that meets the faults."""

    def __init__(self, fragment: Any, header: base.FragmentHeader):
        self._fragment = fragment
        self._where = (header.stage, header.ref.sample_id)

    def write(self, pieces: Sequence[memoryview]) -> None:
        _strike("write", *self._where)
        self._fragment.write(pieces)

    def finish(self) -> base.StoredFragment:
        _strike("finish", *self._where)
        return self._fragment.finish()

    def abort(self) -> None:
        self._fragment.abort()


class FaultyCommitter:
    """A store committer whose commits meet the faults."""

    def __init__(self, store: Any):
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def is_committed(self, run_id: str, sample_id: str) -> bool:
        _strike("look", None, sample_id)
        return bool(self._store.is_committed(run_id, sample_id))

    def commit(self, manifest: Manifest) -> None:
        _strike("commit", None, manifest.sample_id)
        self._store.commit(manifest)


def _let_cpu_schedule_asynchronously() -> None:
    """vLLM forces synchronous scheduling on CPU; the asynchronous form is what GPUs run."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def checked(cls: type, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(checked)


# Called in workers through collective_rpc --------------------------------------------------


def count_logits(worker: Any) -> None:
    """Count from now on how often this worker computes logits."""
    model = worker.model_runner.get_model()
    compute = model.compute_logits
    worker.logits_computed = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        worker.logits_computed += 1
        return compute(*args, **kwargs)

    model.compute_logits = counting


def logits_computed(worker: Any) -> int:
    """How often it did."""
    return worker.logits_computed


def spoil_stage(worker: Any, stage: int, value: float) -> None:
    """Make a stage's last layer give `value` in one channel, until `heal_stage`."""
    import torch
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().rank_in_group != stage:
        return
    decoder = worker.model_runner.get_model().model
    norm = decoder.layers[decoder.end_layer - 1].post_attention_layernorm
    worker.healthy = (norm, norm.weight.data.clone())
    with torch.no_grad():
        norm.weight[0] = value


def heal_stage(worker: Any) -> None:
    """Undo `spoil_stage`."""
    if hasattr(worker, "healthy"):
        norm, weight = worker.healthy
        norm.weight.data.copy_(weight)


def tables(worker: Any) -> dict[str, int]:
    """Entries in the worker's tables."""
    return worker.stagetap_tables()
