"""An engine that exports to Mooncake against no capture, and the way of a sample to a trainer.

The memory is lent by another process. Engines run one after the other in the order A B B A, each
with a store of its own, as in ``bench_capture``.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from bench.bench_capture import STAGES, EngineSpec, run_engine
from stagetap.models import resolve_model
from stagetap.stores.mooncake_processes import Master, MemoryHost

CLIENTS = (1, 8, 32)
LENT_BYTES = 2 << 30
_MODES = ("exporting", "not_exporting")


@dataclass(frozen=True)
class Latency:
    """From the answer to a prompt until its sample is in a trainer's tensors."""

    clients: int
    samples: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class OnlineFigures:
    """Tokens/s are medians. See ``CaptureFigures`` for ``over_plain`` and ``spread``.

    ``over_not_exporting`` compares turns of one engine. In both nobody consumes; ``latency`` is of
    an engine and a trainer that share this machine.
    """

    over_plain: float
    over_not_exporting: float
    plain_tokens_per_s: float
    exporting_tokens_per_s: float
    spread: float
    rounds: int
    latency: list[Latency]


def measure(rounds: int, prompts: int, tokens: int, notify: Callable[[str], None]) -> OnlineFigures:
    """Start five engines: two without StageTap, two that export, and one beside a trainer."""
    model = resolve_model("smollm2")
    plain: list[float] = []
    rates: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="stagetap-bench-") as folder:
        for seed, exports in enumerate((False, True, True, False)):
            notify(f"engine {seed + 1} of 5: {'to Mooncake' if exports else 'without StageTap'}")
            with _store() as uri:
                store = uri if exports else ""
                spec = EngineSpec(
                    model, STAGES, store, rounds, prompts, tokens, seed, modes=list(_MODES)
                )
                found = run_engine(spec, folder)
            plain += found.get("plain", [])
            for name in _MODES:
                rates[name] += found.get(name, [])
        notify("engine 5 of 5: beside a trainer")
        with _store() as uri:
            spec = EngineSpec(
                model, STAGES, uri, rounds, prompts, tokens, seed=9, clients=list(CLIENTS)
            )
            latency = run_engine(spec, folder)
    turns = zip(rates["exporting"], rates["not_exporting"], strict=True)
    exporting = statistics.median(rates["exporting"])
    return OnlineFigures(
        over_plain=exporting / statistics.median(plain),
        over_not_exporting=statistics.median(one / other for one, other in turns),
        plain_tokens_per_s=statistics.median(plain),
        exporting_tokens_per_s=exporting,
        spread=(max(plain) - min(plain)) / statistics.median(plain),
        rounds=len(plain),
        latency=[_latency(int(clients), seconds) for clients, seconds in latency.items()],
    )


def _latency(clients: int, seconds: list[float]) -> Latency:
    p50, p99 = np.percentile(seconds, (50, 99))
    return Latency(clients, len(seconds), 1000 * float(p50), 1000 * float(p99))


@contextmanager
def _store() -> Iterator[str]:
    """The address of a run in a store of its own."""
    with Master() as master, MemoryHost(master.address, LENT_BYTES):
        time.sleep(2)  # it lends a moment after its start
        yield f"mooncake://{master.address}/bench?global_segment_size=0"
