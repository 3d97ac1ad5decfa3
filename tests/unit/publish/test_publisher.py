"""Every job ends in exactly one report, whatever the store or the gather does."""

import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from stagetap.errors import Refused, StageTapError, StoreError
from stagetap.manifest import Tapped
from stagetap.publish.publisher import Gather, Publisher
from stagetap.stores.base import FragmentHeader
from store_samples import drain, job, owned, states, tapped, token_ids
from unit.publish.memory_store import ROW_BYTES, WHAT, MemoryStore, fail, make_publisher, ref


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 33])
def test_the_bytes_that_arrive_are_those_that_were_gathered(
    store: MemoryStore, publisher: Publisher, tokens: int
) -> None:
    publisher.submit(job(WHAT, ref(), 1, tokens))
    (report,) = drain(publisher, 1)
    expected = torch.stack([states(k, tokens) for k in (4, 6)], dim=1).bfloat16()
    payload = expected.view(torch.uint8).numpy().tobytes()
    assert store.data["s", 1] == payload
    fragment = report.fragment
    assert fragment is not None
    assert report.error is None
    assert fragment.checksum == f"xxh3_64:{xxhash.xxh3_64_hexdigest(payload)}"
    assert fragment.byte_size == len(payload)
    assert fragment.shape == (tokens, 2, 16)
    assert fragment.layers == owned(WHAT, 1)
    assert (fragment.stage, fragment.dtype, fragment.path) == (1, "bfloat16", "some/where")
    assert not fragment.input_ids
    assert report.seconds > 0


def test_the_lowest_stage_carries_the_token_ids(store: MemoryStore, publisher: Publisher) -> None:
    publisher.submit(job(WHAT, ref(), 0, 5))
    (report,) = drain(publisher, 1)
    assert report.fragment is not None
    assert report.fragment.input_ids
    assert np.array_equal(store.headers[0].token_ids, token_ids(5))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_are_kept(store: MemoryStore, publisher: Publisher, dtype: str) -> None:
    publisher.submit(job(tapped(dtype=dtype), ref(), 1, 2))
    (report,) = drain(publisher, 1)
    assert report.error is None
    expected = torch.stack([states(k, 2) for k in (4, 6)], dim=1).to(getattr(torch, dtype))
    assert store.data["s", 1] == expected.view(torch.uint8).numpy().tobytes()


def test_pages_are_free_before_the_write_is_durable(
    store: MemoryStore, publisher: Publisher
) -> None:
    go, staged = threading.Event(), []
    store.on_finish = lambda header: go.wait(10) and None
    publisher.submit(job(WHAT, ref(), 1, 9))
    while not staged:
        progress = publisher.poll()
        assert not progress.reports
        staged += progress.staged
    assert staged == [ref()]
    assert publisher.busy() == 1
    go.set()
    (report,) = drain(publisher, 1)
    assert report.error is None
    assert publisher.busy() == 0
    assert publisher.poll().staged == []


STAGES = {
    "open": lambda store, error: setattr(store, "on_open", fail(error)),
    "write": lambda store, error: setattr(store, "on_write", fail(error)),
    "finish": lambda store, error: setattr(store, "on_finish", fail(error)),
}


@pytest.mark.parametrize("where", STAGES)
@pytest.mark.parametrize(
    "error", [StoreError("disk full: cure"), RuntimeError("odd"), SystemExit(3)], ids=type
)
def test_a_failure_of_the_store_is_reported_once_and_leaks_nothing(
    store: MemoryStore, publisher: Publisher, where: str, error: BaseException
) -> None:
    STAGES[where](store, error)
    for number in range(6):
        publisher.submit(job(WHAT, ref(f"s{number}"), 1, 20))
    reports = drain(publisher, 6)
    assert {report.error for report in reports} == {f"{type(error).__name__}: {error}"}
    assert all(report.fragment is None for report in reports)
    assert publisher.pool.in_use == 0
    assert publisher.busy() == 0
    aborted = [] if where == "open" else sorted(f"s{number}" for number in range(6))
    assert sorted(store.aborted) == aborted
    # The threads are alive: what comes next works.
    store.on_open = store.on_finish = lambda header: None
    store.on_write = lambda header, number: None
    publisher.submit(job(WHAT, ref("next"), 1, 20))
    assert drain(publisher, 1)[0].error is None


def test_every_third_write_that_fails_fails_its_own_fragment_alone(
    store: MemoryStore, publisher: Publisher
) -> None:
    def third(header: FragmentHeader, number: int) -> None:
        if int(header.ref.sample_id) % 3 == 2 and number == 1:
            raise StoreError("no")

    store.on_write = third
    for number in range(12):
        publisher.submit(job(WHAT, ref(str(number)), 1, 20))
    failed = {report.ref.sample_id for report in drain(publisher, 12) if report.error}
    assert failed == {"2", "5", "8", "11"}
    assert publisher.pool.in_use == 0


def test_a_failed_gather_frees_its_pages_and_its_slot(
    store: MemoryStore, publisher: Publisher
) -> None:
    publisher.submit(job(WHAT, ref(), 1, 20, gather=fail(RuntimeError("no such page"))))
    staged, reports = [], []
    while not reports:
        progress = publisher.poll()
        staged += progress.staged
        reports += progress.reports
    assert staged == [ref()]
    assert reports[0].error == "RuntimeError: no such page"
    assert store.aborted == ["s"]
    assert publisher.pool.in_use == 0


def test_an_abort_that_fails_does_not_hide_the_cause(
    store: MemoryStore, publisher: Publisher
) -> None:
    store.on_write = fail(StoreError("disk full"))
    store.on_abort = fail(OSError("and read-only"))
    publisher.submit(job(WHAT, ref(), 1, 2))
    (report,) = drain(publisher, 1)
    assert report.error is not None
    assert report.error.startswith("StoreError: disk full; ")
    assert "and read-only" in report.error


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"shape": (0, 2, 16)}, "at least 1"),
        ({"shape": (5, 3, 16)}, "2 layers"),
        ({"layers": (), "shape": (5, 0, 16)}, "0 layers"),
        ({"token_ids": np.arange(4)}, "5 rows"),
        ({"dtype": torch.int8}, "int8"),
        ({"shape": (5, 2, 16 * 5)}, "slot size to at least 320"),
    ],
)
def test_a_job_that_cannot_be_done_is_reported_and_not_raised(
    store: MemoryStore, publisher: Publisher, changes: dict[str, Any], named: str
) -> None:
    publisher.submit(job(WHAT, ref(), 1, 5, **changes))
    (report,) = drain(publisher, 1)
    assert report.error is not None
    assert report.error.startswith("Refused: ")
    assert named in report.error
    assert store.headers == []


def test_a_hung_write_keeps_its_slot_and_does_not_keep_the_others(store: MemoryStore) -> None:
    go = threading.Event()

    def hang(header: FragmentHeader, number: int) -> None:
        if header.ref.sample_id == "hung":
            go.wait(30)

    store.on_write = hang
    publisher = make_publisher(store)
    publisher.submit(job(WHAT, ref("hung"), 1, 4))
    for number in range(3):
        publisher.submit(job(WHAT, ref(str(number)), 1, 20))
    assert {report.ref.sample_id for report in drain(publisher, 3)} == {"0", "1", "2"}
    assert publisher.pool.in_use == 1
    assert publisher.shutdown(0.1) == [ref("hung")]
    assert publisher.pool.in_use == 1
    go.set()
    assert drain(publisher, 1)[0].error is None
    assert publisher.pool.in_use == 0


def test_shutdown_finishes_what_is_queued_and_takes_no_more(store: MemoryStore) -> None:
    publisher = make_publisher(store)
    for number in range(10):
        publisher.submit(job(WHAT, ref(str(number)), 1, 20))
    assert publisher.shutdown(20) == []
    assert len(publisher.poll().reports) == 10
    with pytest.raises(StageTapError, match="shut down"):
        publisher.submit(job(WHAT, ref(), 1, 1))


def test_no_thread_to_write_with_is_refused(store: MemoryStore) -> None:
    with pytest.raises(Refused, match="0 writer threads"):
        make_publisher(store, writer_threads=0)


def spoiled(places: dict[tuple[int, int, int], float], tokens: int, what: Tapped = WHAT) -> Gather:
    """A gather of zeros, but for these values at (token, column, position)."""
    rows = torch.zeros(tokens, 2, 16, dtype=getattr(torch, what.dtype))
    for place, value in places.items():
        rows[place] = value

    def gather(start: int, end: int, out: torch.Tensor) -> None:
        out.copy_(rows[start:end])

    return gather


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({(13, 1, 15): math.nan, (17, 0, 0): math.inf}, "layer 6 is NaN at token 13 of 20; "),
        ({(19, 0, 3): -math.inf}, "layer 4 is Inf at token 19 of 20; "),
        ({(0, 1, 0): math.inf, (0, 0, 9): -math.nan}, "layer 4 is NaN at token 0 of 20; "),
    ],
)
def test_a_state_that_is_not_finite_fails_its_sample(
    store: MemoryStore, dtype: str, places: dict[tuple[int, int, int], float], named: str
) -> None:
    publisher = make_publisher(store, slot_bytes=8 * ROW_BYTES, refuse_nonfinite=True)
    what = tapped(dtype=dtype)
    publisher.submit(job(what, ref("bad"), 1, 20, gather=spoiled(places, 20, what)))
    publisher.submit(job(what, ref("good"), 1, 20))
    errors = {report.ref.sample_id: report.error for report in drain(publisher, 2)}
    cure = 'set the connector option on_nonfinite to "store" to keep such states'
    assert errors == {"bad": f"NonFinite: {named}{cure}", "good": None}
    assert store.aborted == ["bad"]
    assert ("bad", 1) not in store.data
    assert publisher.pool.in_use == 0
    assert publisher.shutdown(10) == []


def test_states_that_are_not_finite_are_kept_bit_for_bit_where_wanted(
    store: MemoryStore, publisher: Publisher
) -> None:
    gather = spoiled({(0, 0, 0): -math.nan, (8, 1, 7): -math.inf}, 9)
    publisher.submit(job(WHAT, ref(), 1, 9, gather=gather))
    (report,) = drain(publisher, 1)
    assert report.error is None
    expected = torch.empty(9, 2, 16, dtype=torch.bfloat16)
    gather(0, 9, expected)
    assert store.data["s", 1] == expected.view(torch.uint8).numpy().tobytes()
