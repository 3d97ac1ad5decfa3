"""Runs whose engines, consumers and masters are processes that get killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import stagetap
from mooncake_run import SIZES, Run, samples_in
from stagetap.errors import DuplicateSample, SampleTimeout, StoreError
from stagetap.stores.base import open_store_committer, open_store_writer
from stagetap.stores.mooncake_processes import Master, MemoryHost
from store_samples import Engine, drain, job, states

Start = Callable[..., "subprocess.Popen[str]"]

# Two samples, then in the middle of the third one.
MID_WRITE = """
    engine = open_engine()
    engine.export("a"); engine.export("b")
    ref = engine.ref("c")
    engine.publisher.submit(job(engine.tapped, ref, 0, 7))
    drain(engine.publisher, 1)
    each = job(engine.tapped, ref, 1, 5000)
    def gather(start, end, out):
        each.gather(start, end, out)
        if start > 2000:
            print("in the middle", flush=True)
            threading.Event().wait()
    engine.publisher.submit(dataclasses.replace(each, gather=gather))
    threading.Event().wait()
"""

# Commits as fast as it can, and says what is committed.
BUSY = """
    engine = open_engine()
    for number in range(100_000):
        engine.export(f"{name}-{number}", tokens=100, seed=number)
        print(f"{name}-{number}", flush=True)
"""

# Says what it takes, and dies over the sample of this name.
CONSUMER = """
    with stagetap.consume(uri, consumer=name, verify=True, timeout_s=4) as stream:
        try:
            for sample in stream:
                print(sample.sample_id, flush=True)
                if sample.sample_id == die_over:
                    os.kill(os.getpid(), signal.SIGKILL)
        except stagetap.SampleTimeout:
            print("end", flush=True)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that runs this code against this run."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str, uri: str, name: str, die_over: str = "") -> subprocess.Popen[str]:
        tests = str(Path(__file__).parents[2])
        header = f"""
            import sys; sys.path[:0] = {[tests, *filter(None, sys.path)]!r}
            import dataclasses, os, signal, threading
            import stagetap
            from stagetap.stores.base import open_store_committer, open_store_writer
            from stagetap.stores.mooncake_uri import parse_uri
            from store_samples import Engine, drain, job
            uri, name, die_over = {uri!r}, {name!r}, {die_over!r}
            def open_engine():
                sides = open_store_committer(uri), open_store_writer(uri)
                return Engine(sides, run=parse_uri(uri).run)
        """
        text = textwrap.dedent(header) + textwrap.dedent(code)
        child = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()


def lines_of(child: subprocess.Popen[str], until: str | None = None) -> list[str]:
    """What it says, up to a line, or until it has ended."""
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line.strip())
        if lines[-1] == until:
            break
    return lines


def kill(child: subprocess.Popen[str]) -> list[str]:
    """What it had said and nobody had read."""
    os.kill(child.pid, signal.SIGKILL)
    rest = lines_of(child)
    child.wait()
    return rest


@pytest.fixture
def hosted(own_master: Master) -> Iterator[Callable[[str], str]]:
    """Addresses of runs in memory that outlives engines and consumers."""
    with MemoryHost(own_master.address, 64 * 1024 * 1024):
        options = "global_segment_size=0&local_buffer_size=2MiB&space_wait=1s"
        probe = f"mooncake://{own_master.address}/probe?{options}"
        deadline = time.monotonic() + 10
        while True:
            try:
                open_store_writer(probe).close()
                break
            except StoreError:
                assert time.monotonic() < deadline
                time.sleep(0.1)
        yield lambda run: f"mooncake://{own_master.address}/{run}?{options}"


def engine_on(uri: str, run: str) -> Engine:
    return Engine((open_store_committer(uri), open_store_writer(uri)), run=run)


def test_a_killed_engine_leaves_what_it_committed_and_nothing_else(
    hosted: Callable[[str], str], start: Start
) -> None:
    uri = hosted("r")
    child = start(MID_WRITE, uri, "")
    lines_of(child, "in the middle")
    kill(child)
    dataset = stagetap.open_dataset(uri, verify=True)
    assert dataset.sample_ids == ["a", "b"]
    for sample in dataset:
        sample.verify()
    with pytest.raises(SampleTimeout):
        dataset.wait("c", 0.3)
    again = engine_on(uri, "r")
    with pytest.raises(DuplicateSample):
        again.export("a")
    again.export("c")
    assert dataset.wait("c", 5).sample_id == "c"
    again.close()


def test_an_engine_killed_anywhere_hides_nothing_that_it_told(
    hosted: Callable[[str], str], start: Start
) -> None:
    uri = hosted("r")
    told: list[str] = []
    for name, seconds in (("x", 0.11), ("y", 0.23), ("z", 0.37)):
        child = start(BUSY, uri, name)
        assert child.stdout is not None
        told.append(child.stdout.readline().strip())
        time.sleep(seconds)
        told += kill(child)
    assert len(told) > 6
    dataset = stagetap.open_dataset(uri, verify=True)
    assert set(told) <= set(dataset.sample_ids)
    assert len(dataset) <= len(told) + 3  # told to nobody, but whole
    for sample in dataset:
        number = int(sample.sample_id.partition("-")[2])
        assert torch.equal(sample.layer(4), states(4, 100, number).bfloat16())


@pytest.mark.full
def test_two_processes_share_a_run_and_one_of_them_dies(
    hosted: Callable[[str], str], own_master: Master, start: Start
) -> None:
    uri, count = hosted("r"), 60
    engine = engine_on(uri, "r")
    engine.export("s0")
    children = {
        "a": start(CONSUMER, uri, "a", die_over="s7"),
        "b": start(CONSUMER, uri, "b", die_over="s7"),
    }
    for number in range(1, count):
        engine.export(f"s{number}", seed=number)
    taken = Counter[str]()
    died = []
    for name, child in children.items():
        lines = lines_of(child, "end")
        if lines[-1] != "end":
            died.append(name)
        taken.update(line for line in lines if line != "end")
    assert len(died) == 1
    assert max(taken.values()) == 1
    # Under its name it gets again what it had taken: the one it died over, those read ahead.
    assert "s7" in taken
    again = lines_of(start(CONSUMER, uri, died[0]), "end")
    assert again[0] == "s7"
    assert not set(again[1:]) & set(taken)
    assert set(taken) | set(again) - {"end"} == {f"s{number}" for number in range(count)}
    assert samples_in(own_master, "r") == []
    engine.close()


def test_what_a_closed_engine_committed_is_read_from_memory_that_others_lend(
    hosted: Callable[[str], str],
) -> None:
    uri = hosted("r")
    engine = engine_on(uri, "r")
    engine.export("s", tokens=4000, seed=3)
    engine.close()
    with stagetap.consume(uri, limit=1, verify=True) as stream:
        (sample,) = stream
        assert torch.equal(sample.layer(6), states(6, 4000, 3).bfloat16())


def test_a_master_that_was_killed_and_comes_back(own_master: Master) -> None:
    """Failures are prompt and named; then export and reading go on with what is new."""
    run = Run(own_master, options=f"{SIZES}&rpc_timeout=1s&put_timeout=2s&get_timeout=2s")
    engine = run.engine
    engine.export("before")
    stream = stagetap.consume(run.uri, timeout_s=2.0)
    iterator = iter(stream)
    assert next(iterator).sample_id == "before"
    port = int(own_master.address.rpartition(":")[2])
    os.kill(own_master.pid, signal.SIGKILL)
    while not own_master.has_ended():
        time.sleep(0.01)
    started = time.monotonic()
    ref = engine.ref("during")
    for stage in (0, 1):
        engine.publisher.submit(job(engine.tapped, ref, stage, 7))
    for report in drain(engine.publisher, 2):
        assert report.error is not None
        assert "mooncake" in report.error
    with pytest.raises(StoreError, match="mooncake"):
        engine.committer.is_committed(run.name, "x")
    with pytest.raises(StoreError, match="mooncake"):
        next(iterator)
    assert time.monotonic() - started < 20
    with Master(port=port, lease_ms=500):
        deadline = time.monotonic() + 20
        number = 0
        while True:
            number += 1
            try:
                ref = engine.ref(f"after-{number}")
                engine.committer.commit(engine.publish(ref, 7))
                break
            except (AssertionError, StoreError):
                assert time.monotonic() < deadline
                time.sleep(0.2)
        while True:
            try:
                sample = next(iterator)
                break
            except StoreError:
                assert time.monotonic() < deadline
        assert sample.sample_id == f"after-{number}"
        stream.finish()
        engine.export("more")
        assert next(iterator).sample_id == "more"
        stream.close()
        engine.close()
