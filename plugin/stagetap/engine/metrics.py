"""What happened to samples and fragments, from both sides of the connector to Prometheus.

Each side fills a ``StatsOutbox`` and vLLM asks it once a step. vLLM merges what the workers and the
scheduler said, carries it to a front end as plain data, and there ``StageTapPromMetrics`` turns it
into series. ``METRICS`` is the only list of them; docs/metrics.md and the dashboard are tested
against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from stagetap.breaker import BreakerState

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FragmentOutcome = Literal["stored", "failed", "dropped"]
SampleOutcome = Literal["committed", "failed", "aborted", "refused"]

FRAGMENT_OUTCOMES: tuple[str, ...] = get_args(FragmentOutcome)
SAMPLE_OUTCOMES: tuple[str, ...] = get_args(SampleOutcome)
BREAKER_STATES: tuple[str, ...] = get_args(BreakerState)
STAGE_GAUGES = ("slots", "slots_in_use", "slot_waiters", "quarantined_slots", "hung_writes")

SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
"""Upper bounds, from a write to memory to the default of ``publish_timeout_s``."""

MB = 1e6


@dataclass(frozen=True)
class Metric:
    """One family of series.

    Attributes:
        name: as in PromQL; a histogram's series add ``_bucket``, ``_sum`` and ``_count``.
        kind: ``counter``, ``gauge`` or ``histogram``.
        label: what it has besides vLLM's own labels: ``stage``, ``state`` or nothing.
        documentation: the line that ``/metrics`` shows.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    label: Literal["stage", "state"] | None
    documentation: str


METRICS = (
    # What became of samples, as the scheduler side saw it.
    Metric("stagetap_samples_committed_total", "counter", None, "Samples committed"),
    Metric("stagetap_samples_failed_total", "counter", None, "Samples that publishing lost"),
    Metric("stagetap_samples_aborted_total", "counter", None, "Samples whose sender went away"),
    Metric("stagetap_samples_refused_total", "counter", None, "Exporting requests that never ran"),
    Metric("stagetap_committed_bytes_total", "counter", None, "Bytes of taps in committed samples"),
    Metric("stagetap_committed_tokens_total", "counter", None, "Rows of committed samples"),
    Metric("stagetap_commit_seconds", "histogram", None, "From a request's end to its commit"),
    Metric("stagetap_samples_under_way", "gauge", None, "Exporting requests that have not ended"),
    Metric("stagetap_breaker_state", "gauge", "state", "1 for the circuit breaker's state, else 0"),
    # What each stage published, as its worker saw it.
    Metric("stagetap_fragments_stored_total", "counter", "stage", "Fragments stored"),
    Metric("stagetap_fragments_failed_total", "counter", "stage", "Fragments not stored: an error"),
    Metric("stagetap_fragments_dropped_total", "counter", "stage", "Fragments given up"),
    Metric("stagetap_fragment_bytes_total", "counter", "stage", "Bytes of taps stored"),
    Metric("stagetap_publish_seconds", "histogram", "stage", "From an order to a stored fragment"),
    Metric("stagetap_slot_wait_seconds_total", "counter", "stage", "Time writers waited for slots"),
    Metric("stagetap_slots", "gauge", "stage", "Slots of the staging pool"),
    Metric("stagetap_slots_in_use", "gauge", "stage", "Slots that are held now"),
    Metric("stagetap_slot_waiters", "gauge", "stage", "Writers that wait for a slot now"),
    Metric("stagetap_quarantined_slots", "gauge", "stage", "Slots that a hung write holds now"),
    Metric("stagetap_hung_writes", "gauge", "stage", "Writes that are overdue and did not return"),
)


@dataclass
class StageTapStats(KVConnectorStats):
    """What happened since the last report, as plain data that pickle and msgpack carry.

    ``data`` holds

    - ``fragments``: one ``[stage, outcome, bytes, seconds]`` each, ``bytes`` of taps;
    - ``stages``: by stage, as text, the latest of ``STAGE_GAUGES`` and ``slot_wait_seconds``, which
      counts from the engine's start; ``slot_wait_reported`` is how much of it earlier reports had;
    - ``samples``: counts by outcome, ``committed_tokens`` and ``committed_bytes``;
    - ``commit_seconds``: one number a commit;
    - ``breaker``, ``under_way``: the latest, or None where nothing was said.
    """

    def __post_init__(self) -> None:
        if not self.data:
            self.reset()

    @classmethod
    def rebuild(cls, data: Mapping[str, Any] | None = None) -> StageTapStats:
        """Stats from what ``to_dict`` gave in another process; empty ones without it.

        Shares nothing with ``data``: several loggers of one front end rebuild from the same.
        """
        stats = cls()
        if data:
            stats._add(data)
        return stats

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {
            "fragments": [],
            "stages": {},
            "samples": dict.fromkeys((*SAMPLE_OUTCOMES, "committed_tokens", "committed_bytes"), 0),
            "commit_seconds": [],
            "breaker": None,
            "under_way": None,
        }

    # Recording: numbers are made plain, for msgpack knows none of NumPy's -------------------

    def record_fragment(
        self, stage: int, outcome: FragmentOutcome, bytes: int, seconds: float
    ) -> None:
        """A fragment has ended, ``seconds`` after it was ordered; 0 bytes unless it is stored."""
        self.data["fragments"].append([int(stage), outcome, int(bytes), float(seconds)])

    def set_stage(
        self,
        stage: int,
        *,
        slots: int,
        slots_in_use: int,
        slot_waiters: int,
        slot_wait_seconds: float,
        quarantined_slots: int,
        hung_writes: int,
    ) -> None:
        """How a stage's staging pool is now; ``slot_wait_seconds`` is all since its start."""
        self.data["stages"].setdefault(str(int(stage)), {}).update(
            slots=int(slots),
            slots_in_use=int(slots_in_use),
            slot_waiters=int(slot_waiters),
            slot_wait_seconds=float(slot_wait_seconds),
            quarantined_slots=int(quarantined_slots),
            hung_writes=int(hung_writes),
        )

    def count_sample(self, outcome: SampleOutcome, tokens: int = 0, bytes: int = 0) -> None:
        """A sample has ended; rows and bytes count when it is committed."""
        samples = self.data["samples"]
        samples[outcome] += 1
        if outcome == "committed":
            samples["committed_tokens"] += int(tokens)
            samples["committed_bytes"] += int(bytes)

    def record_commit(self, seconds: float) -> None:
        """A sample was committed, ``seconds`` after its request had ended."""
        self.data["commit_seconds"].append(float(seconds))

    def set_breaker(self, state: BreakerState) -> None:
        """The state that the circuit breaker is in now."""
        self.data["breaker"] = state

    def set_under_way(self, count: int) -> None:
        """How many exporting requests have not ended."""
        self.data["under_way"] = int(count)

    # What vLLM calls -----------------------------------------------------------------------

    def aggregate(self, other: KVConnectorStats) -> StageTapStats:
        """Merge a later report, or another worker's, into this one: of gauges the other's win.

        Raises:
            TypeError: the other report is another connector's.
        """
        if not isinstance(other, StageTapStats):
            raise TypeError(f"cannot merge StageTap's stats with {type(other).__name__}")
        self._add(other.data)
        return self

    def _add(self, data: Mapping[str, Any]) -> None:
        own = self.data
        own["fragments"] += data["fragments"]
        own["commit_seconds"] += data["commit_seconds"]
        for key, count in data["samples"].items():
            own["samples"][key] += count
        for stage, gauges in data["stages"].items():
            merged = dict(gauges)
            if stage in own["stages"]:
                # The wait that is new in the two together starts where the first one starts.
                reported = own["stages"][stage].get("slot_wait_reported", 0.0)
                merged["slot_wait_reported"] = reported
            own["stages"][stage] = merged
        for key in ("breaker", "under_way"):
            if data[key] is not None:
                own[key] = data[key]

    def is_empty(self) -> bool:
        """Whether nothing was recorded, no gauge either."""
        fresh = StageTapStats()
        return bool(self.data == fresh.data)

    def reduce(self) -> dict[str, int | float]:
        """A few numbers for vLLM's log line: levels where known, the rest unless it is 0."""
        data, stages = self.data, self.data["stages"].values()
        stored = [event for event in data["fragments"] if event[1] == "stored"]
        outcomes = [event[1] for event in data["fragments"]]
        summary: dict[str, int | float] = {}
        if data["under_way"] is not None:
            summary["Samples under way"] = data["under_way"]
        if stages:
            summary["Slots in use"] = sum(stage["slots_in_use"] for stage in stages)
        rest: dict[str, int | float] = {
            **{f"Samples {outcome}": data["samples"][outcome] for outcome in SAMPLE_OUTCOMES},
            "Committed tokens": data["samples"]["committed_tokens"],
            "Committed MB": round(data["samples"]["committed_bytes"] / MB, 3),
            "Max commit (s)": round(max(data["commit_seconds"], default=0.0), 3),
            **{f"Fragments {outcome}": outcomes.count(outcome) for outcome in FRAGMENT_OUTCOMES},
            "Avg publish (s)": round(sum(e[3] for e in stored) / max(len(stored), 1), 3),
            "Max publish (s)": round(max((e[3] for e in stored), default=0.0), 3),
            "Slot waiters": sum(stage["slot_waiters"] for stage in stages),
            "Quarantined slots": sum(stage["quarantined_slots"] for stage in stages),
            "Hung writes": sum(stage["hung_writes"] for stage in stages),
            "Breaker not closed": int(data["breaker"] not in (None, "closed")),
        }
        return summary | {name: value for name, value in rest.items() if value}


class StatsOutbox:
    """One side's report in the making. Not thread-safe: for the thread that steps.

    Attributes:
        stats: what to record into; another object after every ``take``.
    """

    def __init__(self) -> None:
        self.stats = StageTapStats()
        self._said: dict[str, Any] = {}  # gauges as they were last reported, by key and stage

    def take(self) -> StageTapStats | None:
        """The report since the last call, None when there is nothing new to say.

        Gauges that have not changed are left out: idle steps cost no message.
        """
        taken, self.stats = self.stats, StageTapStats()
        for stage, gauges in list(taken.data["stages"].items()):
            before = self._said.get(stage)
            if gauges == before:
                del taken.data["stages"][stage]
                continue
            self._said[stage] = dict(gauges)
            # Counters of several front ends are summed, and each sees only some of the reports.
            gauges["slot_wait_reported"] = before["slot_wait_seconds"] if before else 0.0
        for key in ("breaker", "under_way"):
            if taken.data[key] == self._said.get(key):
                taken.data[key] = None
            elif taken.data[key] is not None:
                self._said[key] = taken.data[key]
        return None if taken.is_empty() else taken


class StageTapPromMetrics(KVConnectorPromMetrics):
    """All of ``METRICS`` in one front end, every series at 0 from the start.

    Args:
        metric_types: what to use as Gauge, Counter and Histogram; Ray has its own.
        labelnames: vLLM's labels, before ours.
        per_engine_labelvalues: their values, by engine index.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        stages = [str(stage) for stage in range(vllm_config.parallel_config.pipeline_parallel_size)]
        values: dict[str | None, Iterable[str]] = {"stage": stages, "state": BREAKER_STATES}
        self._series: dict[tuple[str, int, str | None], Any] = {}
        self._waited: dict[tuple[int, str], float] = {}  # counted so far, by engine and stage
        _unregister()
        for metric in METRICS:
            parent = _register(metric, metric_types, labelnames)
            for engine, labels in per_engine_labelvalues.items():
                for value in values.get(metric.label, [None]):
                    own = [] if value is None else [value]
                    self._series[metric.name, engine, value] = parent.labels(*labels, *own)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add a report, ``StageTapStats.to_dict()``, to the series of its engine."""
        data = transfer_stats_data

        def series(name: str, value: object = None) -> Any:
            return self._series[
                f"stagetap_{name}", engine_idx, None if value is None else str(value)
            ]

        for outcome in SAMPLE_OUTCOMES:
            series(f"samples_{outcome}_total").inc(data["samples"][outcome])
        series("committed_bytes_total").inc(data["samples"]["committed_bytes"])
        series("committed_tokens_total").inc(data["samples"]["committed_tokens"])
        for seconds in data["commit_seconds"]:
            series("commit_seconds").observe(seconds)
        for stage, outcome, byte_size, seconds in data["fragments"]:
            series(f"fragments_{outcome}_total", stage).inc()
            if outcome == "stored":  # others took as long as a timeout lets them
                series("fragment_bytes_total", stage).inc(byte_size)
                series("publish_seconds", stage).observe(seconds)
        for stage, gauges in data["stages"].items():
            for name in STAGE_GAUGES:
                series(name, stage).set(gauges[name])
            series("slot_wait_seconds_total", stage).inc(self._new_wait(engine_idx, stage, gauges))
        if data["under_way"] is not None:
            series("samples_under_way").set(data["under_way"])
        if data["breaker"] is not None:
            for state in BREAKER_STATES:
                series("breaker_state", state).set(int(state == data["breaker"]))

    def _new_wait(self, engine: int, stage: str, gauges: Mapping[str, Any]) -> float:
        """Seconds of a cumulative wait that no front end has counted yet."""
        total, seen = gauges["slot_wait_seconds"], self._waited.get((engine, stage), 0.0)
        self._waited[engine, stage] = total
        if total < seen:  # the stage has started anew
            seen = 0.0
        return float(max(total - max(seen, gauges.get("slot_wait_reported", 0.0)), 0.0))


_registered: list[Any] = []
"""What this process last registered, as vLLM's own cleanup knows names in ``vllm:`` only."""


def _unregister() -> None:
    """Let a process build a second engine: its series replace those of the first."""
    for collector in _registered:
        with suppress(KeyError):  # not in this registry: Ray's, or a private one
            REGISTRY.unregister(collector)
    _registered.clear()


def _register(
    metric: Metric, metric_types: Mapping[type[Any], type[Any]], labelnames: list[str]
) -> Any:
    names = [*labelnames, *([metric.label] if metric.label else [])]
    made: Any
    if metric.kind == "counter":
        made = metric_types[Counter](
            name=metric.name, documentation=metric.documentation, labelnames=names
        )
    elif metric.kind == "gauge":
        made = metric_types[Gauge](
            name=metric.name,
            documentation=metric.documentation,
            labelnames=names,
            # Several front ends: the one that got the last report knows.
            multiprocess_mode="mostrecent",
        )
    else:
        made = metric_types[Histogram](
            name=metric.name,
            documentation=metric.documentation,
            labelnames=names,
            buckets=list(SECONDS_BUCKETS),
        )
    _registered.append(made)
    return made
