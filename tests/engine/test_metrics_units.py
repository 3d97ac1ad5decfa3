"""Numbers from both sides of the connector to ``/metrics``, the dashboard and its documentation.

vLLM is imported, but no engine is started.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import generate_latest as exposition
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorPromMetrics,
    MultiKVConnectorStats,
)
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics import ray_wrappers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from stagetap.engine.metrics import (
    BREAKER_STATES,
    FRAGMENT_OUTCOMES,
    METRICS,
    SAMPLE_OUTCOMES,
    StageTapPromMetrics,
    StageTapStats,
    StatsOutbox,
)

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
KINDS = {metric.name: metric.kind for metric in METRICS}
LABELNAMES = ["model_name", "engine"]
LABELS: dict[int, list[object]] = {0: ["tiny", "0"]}
STAGES = 2


def config(**changes: Any) -> Any:
    """As much of a VllmConfig as metrics read."""
    return SimpleNamespace(
        kv_transfer_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=STAGES),
        **changes,
    )


class FrontEnd:
    """One front end's metrics in a registry of its own, read back as a scraper would."""

    def __init__(self, labels: dict[int, list[object]] = LABELS):
        self.registry = CollectorRegistry()
        types: Any = {
            kind: partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram)
        }
        self.metrics = StageTapPromMetrics(config(), types, LABELNAMES, labels)

    def __call__(self, name: str, **labels: str) -> float | None:
        every = {"model_name": "tiny", "engine": "0", **labels}
        return self.registry.get_sample_value(f"stagetap_{name}", every)


def pool(stats: StageTapStats, stage: int, **changes: Any) -> None:
    """Set a stage's gauges, each at some value of its own."""
    usual = {
        "slots": 4,
        "slots_in_use": 3,
        "slot_waiters": 2,
        "slot_wait_seconds": 1.5,
        "quarantined_slots": 1,
        "hung_writes": 1,
    }
    stats.set_stage(stage, **{**usual, **changes})


def workers_report(stage: int) -> StageTapStats:
    stats = StageTapStats()
    stats.record_fragment(stage, "stored", 1000, 0.02)
    stats.record_fragment(stage, "failed", 0, 3.0)
    stats.record_fragment(stage, "dropped", 0, 0.0)
    pool(stats, stage)
    return stats


def schedulers_report() -> StageTapStats:
    stats = StageTapStats()
    stats.count_sample("committed", tokens=7, bytes=2000)
    for outcome in ("failed", "aborted", "refused"):
        stats.count_sample(outcome)
    stats.record_commit(0.3)
    stats.set_breaker("half_open")
    stats.set_under_way(5)
    return stats


def step() -> KVConnectorStats:
    """What the scheduler makes of one step: workers through the executor, then its own side."""
    said = [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=pickle.loads(
                pickle.dumps(KVConnectorOutput(kv_connector_stats=workers_report(stage)))
            ),
        )
        for stage in range(STAGES)
    ]
    merged = KVOutputAggregator(STAGES).aggregate(said, output_rank=STAGES - 1)
    assert merged is not None
    assert merged.kv_connector_output is not None
    assert merged.kv_connector_output.kv_connector_stats is not None
    return merged.kv_connector_output.kv_connector_stats.aggregate(schedulers_report())


def sent(stats: KVConnectorStats) -> dict[str, Any]:
    """The payload as the front end gets it, through vLLM's own encoding."""
    outputs = EngineCoreOutputs(
        scheduler_stats=SchedulerStats(kv_connector_stats=stats.to_dict() if stats else None)
    )
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs))
    assert received.scheduler_stats.kv_connector_stats is not None
    return received.scheduler_stats.kv_connector_stats


def expect_one_step(read: Callable[..., float | None]) -> None:
    for outcome in SAMPLE_OUTCOMES:
        assert read(f"samples_{outcome}_total") == 1
    assert read("committed_bytes_total") == 2000
    assert read("committed_tokens_total") == 7
    assert read("commit_seconds_sum") == pytest.approx(0.3)
    assert read("samples_under_way") == 5
    assert [read("breaker_state", state=state) for state in BREAKER_STATES] == [0, 0, 1]
    for stage in ("0", "1"):
        for outcome in FRAGMENT_OUTCOMES:
            assert read(f"fragments_{outcome}_total", stage=stage) == 1
        assert read("fragment_bytes_total", stage=stage) == 1000
        assert read("publish_seconds_count", stage=stage) == 1, "stored fragments only"
        assert read("publish_seconds_bucket", stage=stage, le="0.01") == 0
        assert read("publish_seconds_bucket", stage=stage, le="0.025") == 1
        assert read("slot_wait_seconds_total", stage=stage) == 1.5
        assert read("slots", stage=stage) == 4
        assert read("slots_in_use", stage=stage) == 3
        assert read("slot_waiters", stage=stage) == 2
        assert read("quarantined_slots", stage=stage) == 1
        assert read("hung_writes", stage=stage) == 1


# From both sides to the front end ---------------------------------------------------------------


def test_a_step_arrives() -> None:
    front_end = FrontEnd()
    front_end.metrics.observe(sent(step()))
    expect_one_step(front_end)


def test_a_step_arrives_inside_a_multi_connector() -> None:
    front_end = FrontEnd()
    multi = MultiKVConnectorPromMetrics(
        config(),
        {Gauge: Gauge, Counter: Counter, Histogram: Histogram},
        LABELNAMES,
        LABELS,
        {"StageTapConnector": front_end.metrics},
    )
    merged = MultiKVConnectorStats({"StageTapConnector": workers_report(0)})
    merged.aggregate(MultiKVConnectorStats({"StageTapConnector": workers_report(1)}))
    merged.aggregate(MultiKVConnectorStats({"StageTapConnector": schedulers_report()}))
    assert not merged.is_empty()
    payload = sent(merged)
    assert StageTapStats.rebuild(payload["StageTapConnector"]) == step()
    multi.observe(payload)
    expect_one_step(front_end)


def test_engines_of_one_front_end_are_apart() -> None:
    front_end = FrontEnd({0: ["tiny", "0"], 1: ["tiny", "1"]})
    front_end.metrics.observe(sent(step()), engine_idx=1)
    expect_one_step(lambda name, **labels: front_end(name, engine="1", **labels))
    assert front_end("samples_committed_total") == 0
    assert front_end("slot_wait_seconds_total", stage="0") == 0


counts = st.integers(0, 9)
events = st.tuples(st.integers(0, 1), st.sampled_from(FRAGMENT_OUTCOMES), counts, st.floats(0, 9))


@st.composite
def reports(draw: st.DrawFn) -> StageTapStats:
    stats = StageTapStats()
    for event in draw(st.lists(events, max_size=3)):
        stats.record_fragment(*event)  # type: ignore[arg-type]
    for outcome in draw(st.lists(st.sampled_from(SAMPLE_OUTCOMES), max_size=3)):
        stats.count_sample(outcome, draw(counts), draw(counts))  # type: ignore[arg-type]
    for stage in draw(st.sets(st.integers(0, 1))):
        pool(stats, stage, slots_in_use=draw(counts), slot_wait_seconds=draw(counts))
    if draw(st.booleans()):
        stats.set_breaker(draw(st.sampled_from(BREAKER_STATES)))  # type: ignore[arg-type]
        stats.set_under_way(draw(counts))
    return stats


@given(reports(), reports(), reports())
def test_merging(a: StageTapStats, b: StageTapStats, c: StageTapStats) -> None:
    """In any grouping the same, nothing lost or counted twice, and the later gauge wins."""

    def copy(stats: StageTapStats) -> StageTapStats:
        return StageTapStats.rebuild(stats.to_dict())

    whole = copy(a).aggregate(copy(b)).aggregate(copy(c))
    assert whole == copy(a).aggregate(copy(b).aggregate(copy(c)))
    assert StageTapStats().aggregate(a) == a
    assert copy(a).aggregate(StageTapStats()) == a
    assert whole.is_empty() == (a.is_empty() and b.is_empty() and c.is_empty())
    assert sorted(whole.data["fragments"]) == sorted(
        event for stats in (a, b, c) for event in stats.data["fragments"]
    )
    for key in whole.data["samples"]:
        assert whole.data["samples"][key] == sum(s.data["samples"][key] for s in (a, b, c))
    for stage in ("0", "1"):
        said = [s.data["stages"][stage] for s in (a, b, c) if stage in s.data["stages"]]
        if said:
            assert whole.data["stages"][stage].items() >= said[-1].items()
    known = [s.data["under_way"] for s in (a, b, c) if s.data["under_way"] is not None]
    assert whole.data["under_way"] == (known[-1] if known else None)


def test_reports_share_nothing() -> None:
    """Two loggers rebuild from one payload and add to what they got."""
    payload = step().to_dict()
    before = json.dumps(payload)
    for _ in range(2):
        StageTapStats.rebuild(payload).aggregate(workers_report(0))
    assert json.dumps(payload) == before
    other = workers_report(1)
    merged = StageTapStats().aggregate(other)
    merged.record_fragment(1, "stored", 1, 1.0)
    pool(merged, 1, slots=9)
    assert other == workers_report(1)


def test_another_connectors_stats_are_not_merged() -> None:
    with pytest.raises(TypeError, match="MultiKVConnectorStats"):
        StageTapStats().aggregate(MultiKVConnectorStats())


def test_reset() -> None:
    stats = workers_report(0)
    stats.reset()
    assert stats.is_empty()
    assert stats == StageTapStats.rebuild(None) == StageTapStats.rebuild({})


# Waiting counts from the engine's start and is exported as a counter -----------------------------


def test_the_same_report_twice_counts_no_wait_twice() -> None:
    front_end = FrontEnd()
    for wait, expected in ((1.5, 1.5), (1.5, 1.5), (4.0, 4.0), (0.5, 4.5)):  # last: a new start
        stats = StageTapStats()
        pool(stats, 1, slot_wait_seconds=wait)
        front_end.metrics.observe(stats.to_dict())
        assert front_end("slot_wait_seconds_total", stage="1") == expected


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=8), st.booleans())
def test_several_front_ends_count_every_wait_once(
    steps: list[tuple[int, int]], in_pairs: bool
) -> None:
    """vLLM gives a report to one front end of several, and a scraper sees their counters' sum."""
    front_ends = [FrontEnd() for _ in range(3)]
    outbox, waited, held = StatsOutbox(), 0, StageTapStats()
    for number, (more, front_end) in enumerate(steps):
        waited += more
        pool(outbox.stats, 0, slot_wait_seconds=waited)
        taken = outbox.take()
        if taken is not None:
            held.aggregate(taken)
        if in_pairs and number % 2 == 0 and number + 1 < len(steps):
            continue  # goes out together with the next one
        front_ends[front_end].metrics.observe(sent(held))
        held = StageTapStats()
    counted = [read("slot_wait_seconds_total", stage="0") for read in front_ends]
    assert sum(value or 0.0 for value in counted) == waited


# One side's outbox --------------------------------------------------------------------------------


def test_an_outbox_says_things_once() -> None:
    outbox = StatsOutbox()
    assert outbox.take() is None

    def settle() -> None:
        pool(outbox.stats, 0)
        outbox.stats.set_breaker("closed")
        outbox.stats.set_under_way(0)

    settle()
    first = outbox.take()
    assert first is not None
    assert first.data["stages"]["0"]["slot_wait_reported"] == 0
    assert (first.data["breaker"], first.data["under_way"]) == ("closed", 0)
    settle()
    assert outbox.take() is None, "nothing has changed"
    assert outbox.take() is None, "nothing was said"
    settle()
    outbox.stats.record_fragment(0, "stored", 1, 1.0)
    event = outbox.take()
    assert event is not None
    assert event.data == StageTapStats().data | {"fragments": [[0, "stored", 1, 1.0]]}
    pool(outbox.stats, 0, slots_in_use=0)
    outbox.stats.set_breaker("open")
    changed = outbox.take()
    assert changed is not None
    assert changed.data["stages"]["0"]["slot_wait_reported"] == 1.5
    assert (changed.data["breaker"], changed.data["under_way"]) == ("open", None)


def test_the_log_line() -> None:
    assert step().reduce() == {
        "Samples under way": 5,
        "Slots in use": 6,
        "Samples committed": 1,
        "Samples failed": 1,
        "Samples aborted": 1,
        "Samples refused": 1,
        "Committed tokens": 7,
        "Committed MB": 0.002,
        "Max commit (s)": 0.3,
        "Fragments stored": 2,
        "Fragments failed": 2,
        "Fragments dropped": 2,
        "Avg publish (s)": 0.02,
        "Max publish (s)": 0.02,
        "Slot waiters": 4,
        "Quarantined slots": 2,
        "Hung writes": 2,
        "Breaker not closed": 1,
    }
    quiet = StageTapStats()
    pool(quiet, 0, slots_in_use=0, slot_waiters=0, quarantined_slots=0, hung_writes=0)
    quiet.set_breaker("closed")
    assert quiet.reduce() == {"Slots in use": 0}


# What is registered -------------------------------------------------------------------------------


def test_every_series_is_there_from_the_start() -> None:
    front_end = FrontEnd()
    kinds, series = {}, set()
    for line in exposition(front_end.registry).decode().splitlines():
        if match := re.fullmatch(r"# TYPE (\w+) (\w+)", line):
            kinds[match[1]] = match[2]
        elif match := re.fullmatch(r"(\w+)\{(.*)\} 0\.0", line):
            labels = dict(pair.split("=") for pair in match[2].split(",") if "le=" not in pair)
            series.add((match[1], *sorted(labels.items())))
    created = {f"{name.removesuffix('_total')}_created" for name in KINDS}
    assert {name: kind for name, kind in kinds.items() if name not in created} == KINDS
    own = {None: [()], "stage": [("stage", f'"{stage}"') for stage in range(STAGES)]}
    own["state"] = [("state", f'"{state}"') for state in BREAKER_STATES]
    for metric in METRICS:
        name = metric.name + ("_count" if metric.kind == "histogram" else "")
        for label in own[metric.label]:
            labels = [("engine", '"0"'), ("model_name", '"tiny"'), *([label] if label else [])]
            assert (name, *labels) in series


def test_a_second_engine_of_a_process() -> None:
    """vLLM registers anew for every engine; a name that is still there would stop it."""
    types: Any = {kind: kind for kind in (Gauge, Counter, Histogram)}
    for _ in range(2):
        metrics = StageTapPromMetrics(config(), types, LABELNAMES, LABELS)
        metrics.observe(step().to_dict())
        name = "stagetap_samples_committed_total"
        assert REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0"}) == 1


def test_rays_metric_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their wrappers in vLLM take fewer arguments, and no ``_total`` is added to a name."""
    said: dict[tuple[str, str], list[float]] = {}

    class RayMetric:
        def __init__(self, name: str, description: str, tag_keys: Any, boundaries: Any = None):
            self.name, self._tag_keys = name, tag_keys

        def record(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self._tag_keys)
            said.setdefault((self.name, tags.get("stage", "")), []).append(value)

        inc = set = observe = record

    ray = SimpleNamespace(Gauge=RayMetric, Counter=RayMetric, Histogram=RayMetric)
    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray)
    monkeypatch.setattr(ray_wrappers, "ray_serve", None)
    types: Any = {
        Gauge: ray_wrappers.RayGaugeWrapper,
        Counter: ray_wrappers.RayCounterWrapper,
        Histogram: ray_wrappers.RayHistogramWrapper,
    }
    StageTapPromMetrics(config(), types, LABELNAMES, LABELS).observe(sent(step()))
    assert {name for name, _ in said} == set(KINDS)
    assert said["stagetap_fragments_stored_total", "1"] == [1]
    assert said["stagetap_publish_seconds", "0"] == [0.02]


# What is said about them --------------------------------------------------------------------------


def metrics_in(expression: str) -> set[str]:
    """Metric names in PromQL: series of a histogram count as the histogram."""
    names = re.findall(r"stagetap_\w+", expression)
    return {
        base if KINDS.get(base := re.sub("_(bucket|sum|count)$", "", name)) == "histogram" else name
        for name in names
    }


def expressions(node: Any) -> list[str]:
    """Every query in a dashboard, of its variables too."""
    if isinstance(node, list):
        return [found for item in node for found in expressions(item)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("expr", "definition", "query") if isinstance(node.get(key), str)]
    return own + [found for item in node.values() for found in expressions(item)]


def test_the_dashboard_shows_what_exists() -> None:
    dashboard = json.loads((ROOT / "configs/grafana/stagetap.json").read_text())
    named = set().union(*(metrics_in(expression) for expression in expressions(dashboard)))
    assert named == set(KINDS)
    panels = dashboard["panels"]
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        for target in panel["targets"]:
            assert '{model_name=~"$model_name", instance=~"$instance"}' in target["expr"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == [
        "datasource",
        "model_name",
        "instance",
    ]


def test_the_documentation_lists_what_exists() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    rows = re.findall(r"^\| `(stagetap_\w+)` \| (\w+) \| (?:`(\w+)`)? ?\|", text, re.MULTILINE)
    assert rows == [(metric.name, metric.kind, metric.label or "") for metric in METRICS]
    for alert in re.findall(r"`([^`]*stagetap_[^`]*)`", text):
        assert metrics_in(alert.replace("^stagetap_", "").replace("stagetap.json", "")) <= set(
            KINDS
        ), alert
