"""Calls that block: who waits is told in time, and memory lives until they return."""

from __future__ import annotations

import gc
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from stagetap.errors import StoreError
from stagetap.stores.mooncake_calls import BoundedCalls, CallTimeout


class Memory:
    """What a call was given."""


@pytest.fixture
def calls() -> Iterator[BoundedCalls]:
    calls = BoundedCalls("test", most_threads=2)
    yield calls
    calls.end(1.0)


@pytest.fixture
def hang() -> Iterator[threading.Event]:
    """What hanging calls wait for."""
    event = threading.Event()
    yield event
    event.set()


def test_results_and_errors_come_back(calls: BoundedCalls) -> None:
    assert [calls.run(partial(int, text), 1.0, "read") for text in "0123456789"] == list(range(10))
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0, 1.0, "divide")
    assert calls.running == 0


def test_what_was_started_is_waited_for_later(calls: BoundedCalls, hang: threading.Event) -> None:
    answer = calls.start(hang.wait, 0.1, "look for k", "k")
    assert calls.running == 1
    with pytest.raises(CallTimeout, match=r"look for k took longer than 0\.1 s"):
        answer()
    hang.set()
    assert answer() is True, "it has returned since"
    failing = calls.start(lambda: 1 // 0, 1.0, "divide")
    with pytest.raises(ZeroDivisionError):
        failing()


def test_a_hanging_call_is_reported_in_time_and_named(
    calls: BoundedCalls, hang: threading.Event
) -> None:
    started = time.monotonic()
    with pytest.raises(CallTimeout, match=r"put k took longer than 0\.1 s") as timeout:
        calls.run(hang.wait, 0.1, "put k", "k")
    assert time.monotonic() - started < 1
    assert timeout.value.path == "k"
    assert not timeout.value.returned.is_set()
    hang.set()
    assert timeout.value.returned.wait(1)


def test_what_a_hanging_call_was_given_lives_until_it_returns(
    calls: BoundedCalls, hang: threading.Event
) -> None:
    memory = Memory()
    alive = weakref.ref(memory)

    def call(memory: Memory = memory) -> None:
        hang.wait()

    with pytest.raises(CallTimeout) as timeout:
        calls.run(call, 0.05, "put")
    del memory, call
    returned = timeout.value.returned
    del timeout
    gc.collect()
    assert alive() is not None
    hang.set()
    assert returned.wait(1)
    for _ in range(100):
        if alive() is None:
            break
        time.sleep(0.01)
    assert alive() is None


def test_other_calls_go_on_beside_a_hanging_one_until_too_many_hang(
    calls: BoundedCalls, hang: threading.Event
) -> None:
    for _ in range(2):
        with pytest.raises(CallTimeout):
            calls.run(hang.wait, 0.05, "put")
        if calls.running == 1:
            assert calls.run(lambda: 1, 1.0, "get") == 1
    with pytest.raises(StoreError, match="2 earlier calls have not returned"):
        calls.run(lambda: 1, 1.0, "get")
    hang.set()
    for _ in range(100):
        if not calls.running:
            break
        time.sleep(0.01)
    assert calls.run(lambda: 1, 1.0, "get") == 1


def test_the_end_waits_for_what_runs(hang: threading.Event) -> None:
    calls = BoundedCalls("test")
    with pytest.raises(CallTimeout):
        calls.run(hang.wait, 0.05, "put")
    assert not calls.end(0.05)
    with pytest.raises(StoreError, match="closed"):
        calls.run(lambda: 1, 1.0, "get")
    hang.set()
    assert calls.end(1.0)


def test_a_timeout_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(CallTimeout("put k", path="k")))
    assert type(error) is CallTimeout
    assert str(error) == "put k"
