"""Consumers of a run: nothing taken twice, nothing left, whoever dies where."""

import queue
import re
import threading
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch

from stagetap.errors import (
    MissingFragment,
    Refused,
    SampleFailed,
    SampleNotFound,
    SampleTimeout,
    StoreError,
)
from stagetap.reader.consumer import Consumption
from stagetap.reader.online import OnlineStream, consume
from stagetap.stores.mooncake_objects import StoreFull
from store_samples import RUN, states
from unit.stores.memory_objects import Died, Master, MemoryObjects, dies_at, fails_at
from unit.stores.memory_store import make_engine, reader_of, sample_keys


def stream_of(master: Master, **changes: Any) -> OnlineStream:
    how = {
        "consumer": "c",
        "sharing": "claim",
        "consumers": (),
        "removal": "auto",
        "failures": "raise",
    }
    fields: dict[str, Any] = {
        "sample_ids": None,
        "verify": True,
        "timeout_s": 0.7,
        "limit": None,
        "prefetch": 2,
    }
    how |= {key: changes.pop(key) for key in list(changes) if key in how}
    return OnlineStream(reader_of(master), Consumption(**how), **(fields | changes))  # type: ignore[arg-type]


@pytest.fixture
def master() -> Master:
    return Master()


def test_a_run_is_consumed_and_nothing_is_left(master: Master) -> None:
    engine = make_engine(master, slot_bytes=96)
    for number in range(20):
        engine.export(f"s/{number}", seed=number)
    with stream_of(master, limit=20) as stream:
        for number, sample in enumerate(stream):
            assert sample.sample_id == f"s/{number}"
            assert torch.equal(sample.layer(4), states(4, 7, number).bfloat16())
        assert stream.consumed == 20
    assert sample_keys(master) == []


def test_samples_arrive_as_they_are_committed(master: Master) -> None:
    engine = make_engine(master)
    with stream_of(master, timeout_s=5.0) as stream:
        iterator = iter(stream)
        for number in range(3):
            engine.export(f"s{number}")
            assert next(iterator).sample_id == f"s{number}"


def test_a_silent_run_times_out_and_can_be_waited_for_again(master: Master) -> None:
    engine = make_engine(master)
    with stream_of(master) as stream:
        iterator = iter(stream)
        for _ in range(2):
            with pytest.raises(SampleTimeout, match=RUN):
                next(iterator)
        engine.export("s")
        assert next(iterator).sample_id == "s"


@pytest.mark.parametrize("removal", ["force", "lease", "keep"])
def test_no_sample_goes_to_two_consumers(removal: str) -> None:
    master = Master(lease_s=0.05)
    engine = make_engine(master)
    count, taken, streams = 60, Counter[str](), []
    for number in range(count):
        engine.export(f"s{number}", tokens=2, seed=number)

    def consume(name: str) -> None:
        stream = stream_of(master, consumer=name, removal=removal)
        streams.append(stream)
        try:
            for sample in stream:
                number = int(sample.sample_id[1:])
                assert torch.equal(sample.layer(0), states(0, 2, number).bfloat16())
                taken[sample.sample_id] += 1
        except SampleTimeout:
            finished.add(name)

    finished: set[str] = set()
    threads = [threading.Thread(target=consume, args=(name,)) for name in ("a", "b", "c")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == {"a", "b", "c"}
    assert taken == Counter({f"s{number}": 1 for number in range(count)})
    for stream in streams:
        stream.settle(5)
    if removal != "keep":
        assert sample_keys(master) == []
    else:
        again = stream_of(master, consumer="a", removal=removal)
        with pytest.raises(SampleTimeout):
            next(iter(again))


def test_a_broadcast_reaches_everybody_and_the_last_one_removes() -> None:
    master = Master(lease_s=0.05)
    engine = make_engine(master)
    for number in range(5):
        engine.export(f"s{number}")
    names = ("a", "b")
    for name in names:
        stream = stream_of(master, consumer=name, consumers=names, sharing="broadcast", limit=5)
        assert [sample.sample_id for sample in stream] == [f"s{number}" for number in range(5)]
        stream.settle(5)
        assert bool(sample_keys(master)) == (name == "a")


def test_a_consumer_that_is_started_again_gets_what_it_had_not_finished(master: Master) -> None:
    engine = make_engine(master)
    for number in range(4):
        engine.export(f"s{number}")
    first = iter(stream_of(master))
    assert [next(first).sample_id, next(first).sample_id] == ["s0", "s1"]
    other = stream_of(master, consumer="other", timeout_s=0.6)
    taken = []
    try:
        for sample in other:
            taken.append(sample.sample_id)
    except SampleTimeout:
        pass
    assert not {"s0", "s1"} & set(taken)
    again = stream_of(master)
    rest = []
    try:
        for sample in again:
            rest.append(sample.sample_id)
    except SampleTimeout:
        pass
    assert sorted(["s0", *taken, *rest]) == [f"s{number}" for number in range(4)]
    assert sample_keys(master) == []


@pytest.mark.parametrize("step", range(12))
def test_a_consumer_that_dies_anywhere_loses_and_leaves_nothing(master: Master, step: int) -> None:
    engine = make_engine(master)
    engine.export("s")
    stream = stream_of(master, prefetch=1, limit=1)
    objects = stream._reader.connection.objects
    objects.before = dies_at(step)
    handed_out = []
    try:
        for sample in stream:
            handed_out.append(sample.sample_id)
    except Died:
        pass
    again = stream_of(master)
    try:
        for sample in again:
            handed_out.append(sample.sample_id)
    except SampleTimeout:
        pass
    assert handed_out  # at least once
    assert len(handed_out) <= 2
    assert sample_keys(master) == []


def test_ids_from_a_queue(master: Master) -> None:
    engine = make_engine(master)
    ids: queue.Queue[str | None] = queue.Queue()
    stream = stream_of(master, sample_ids=ids, timeout_s=5.0)
    iterator = iter(stream)
    for name in ("b", "a"):
        engine.export(name)
        ids.put(name)
        assert next(iterator).sample_id == name
    ids.put(None)
    assert list(iterator) == []
    assert sample_keys(master) == []


def test_an_id_that_failed_or_never_came_or_is_taken_raises(master: Master) -> None:
    engine = make_engine(master)
    engine.export("taken")
    next(iter(stream_of(master, consumer="other", sample_ids=["taken"])))
    engine.committer.record_error(engine.ref("bad"), 1, "no space")
    engine.export("good")
    wanted = ["bad", "absent", "taken", "good"]
    iterator = iter(stream_of(master, sample_ids=wanted, timeout_s=0.6))
    with pytest.raises(SampleFailed, match="no space") as caught:
        next(iterator)
    assert (caught.value.cause, caught.value.stage, caught.value.sample_id) == (
        "no space",
        1,
        "bad",
    )
    with pytest.raises(SampleTimeout, match="absent"):
        next(iterator)
    with pytest.raises(SampleNotFound, match="another consumer"):
        next(iterator)
    assert next(iterator).sample_id == "good"
    with pytest.raises(StopIteration):
        next(iterator)


@pytest.mark.parametrize("failures", ["raise", "skip"])
def test_failures_of_a_run(master: Master, failures: str) -> None:
    engine = make_engine(master)
    engine.committer.record_error(engine.ref("bad"), None, "no space")
    engine.committer.record_error(engine.ref("retried"), None, "no space")
    engine.export("retried")
    stream = stream_of(master, failures=failures)
    iterator = iter(stream)
    if failures == "raise":
        with pytest.raises(SampleFailed, match="'bad'"):
            next(iterator)
    assert next(iterator).sample_id == "retried"
    assert stream.failed == 1
    stream.finish()
    assert sample_keys(master) == []


def test_a_broken_sample_does_not_end_the_stream(master: Master) -> None:
    engine = make_engine(master)
    made = engine.export("broken")
    engine.export("whole")
    del master.objects[made.fragments[1].path]
    iterator = iter(stream_of(master))
    with pytest.raises(MissingFragment, match="stage 1"):
        next(iterator)
    assert next(iterator).sample_id == "whole"


def test_what_is_read_ahead_is_bounded(master: Master) -> None:
    engine = make_engine(master)
    for number in range(30):
        engine.export(f"s{number}", tokens=2)
    stream = stream_of(master, limit=30, prefetch=2)
    for sample in stream:
        assert sample.manifest.token_count == 2
        del sample
    assert stream._reader.connection.buffers.made <= 10


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("by_id", [False, True])
def test_what_the_store_fails_over_is_had_at_the_next_try(
    master: Master, step: int, by_id: bool
) -> None:
    engine = make_engine(master)
    names = [f"s{number}" for number in range(4)]
    for name in names:
        engine.export(name)
    stream = stream_of(master, sample_ids=names if by_id else None, prefetch=1)
    iter(stream)
    objects = stream._reader.connection.objects
    assert isinstance(objects, MemoryObjects)
    objects.before = fails_at(step)
    seen, errors = [], []
    while len(seen) < len(names):
        try:
            seen.append(next(stream).sample_id)
        except StoreError as error:
            errors.append(str(error))
    stream.finish()
    stream.settle(5)
    assert seen == names
    assert len(errors) <= 1
    assert sample_keys(master) == []
    stream.close()


@pytest.mark.parametrize("reads", range(1, 12))
def test_a_read_that_fails_anywhere_loses_no_sample(master: Master, reads: int) -> None:
    engine = make_engine(master)
    for number in range(3):
        engine.export(f"s{number}")
    stream = stream_of(master, prefetch=1)
    iter(stream)
    objects = stream._reader.connection.objects
    assert isinstance(objects, MemoryObjects)
    get, left = objects.get, [reads]

    def fail_once(key: str) -> bytes | None:
        left[0] -= 1
        if left[0] == 0:
            raise StoreError(f"cannot get {key}")
        return get(key)

    objects.get = fail_once  # type: ignore[method-assign]
    seen = []
    while len(seen) < 3:
        with suppress(StoreError):
            seen.append(next(stream).sample_id)
    assert seen == ["s0", "s1", "s2"]
    stream.close()


def test_a_full_store_holds_up_an_acknowledgement_and_loses_none(master: Master) -> None:
    engine = make_engine(master)
    engine.export("a")
    names = {"sharing": "broadcast", "consumers": ("c", "d")}
    stream, other = stream_of(master, **names), stream_of(master, consumer="d", **names)
    next(iter(stream)), next(iter(other))
    master.room_bytes = 0
    with pytest.raises(StoreFull):
        stream.finish()
    master.room_bytes = 1 << 40
    stream.finish()
    other.finish()
    assert sample_keys(master) == []


def test_a_queue_that_stays_empty_times_out_and_holds_up_no_end(master: Master) -> None:
    engine = make_engine(master)
    engine.export("a")
    ids: queue.Queue[str | None] = queue.Queue()
    ids.put("a")
    with stream_of(master, sample_ids=ids, timeout_s=0.3) as stream:
        assert next(iter(stream)).sample_id == "a"
        with pytest.raises(SampleTimeout, match=r"no sample id .* for 0.3 s"):
            next(stream)
        ids.put(5)  # type: ignore[arg-type]
        with pytest.raises(Refused, match="sample id 5: ids are strings"):
            next(stream)
    engine.export("b")
    ids.put("b")
    with stream_of(master, sample_ids=ids, timeout_s=1e9) as stream:
        assert next(iter(stream)).sample_id == "b"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sharing": "brodcast"}, "sharing='brodcast': give one of 'claim', 'broadcast'"),
        ({"removal": "never"}, "removal='never': give one of 'auto'"),
        ({"failures": "rais"}, "failures='rais'"),
        ({"timeout_s": float("nan")}, "timeout_s=nan: give 0 or more"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"limit": 0}, "limit=0: give 1 or more"),
        ({"prefetch": 0}, "prefetch=0"),
        ({"sample_ids": "abc"}, "lists of strings"),
        ({"consumers": "ab", "sharing": "broadcast"}, "lists of strings"),
        ({"consumer": ""}, "a name that is not empty"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=re.escape(message)):
        consume("mooncake://127.0.0.1:1/run", **wrong)


def test_what_makes_no_sense_is_refused() -> None:
    from stagetap.reader.online import consume

    with pytest.raises(Refused, match="consumers"):
        consume("mooncake://h:1/r", sharing="broadcast", consumer="a")
    with pytest.raises(Refused, match="broadcast"):
        consume("mooncake://h:1/r", consumers=("a",))
