"""An attempt that dies while it is published frees its pages at once, and its slot when it can."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stagetap.errors import StoreError
from stagetap.publish.pool import Slot
from stagetap.publish.publisher import (
    FragmentJob,
    FragmentReport,
    Gather,
    PoolStatus,
    Publisher,
)
from stagetap.stores.base import FragmentHeader, FragmentWriter, SampleRef
from stagetap.stores.file_writer import FileStoreWriter
from store_samples import job
from unit.publish.memory_store import WHAT, Hang, MemoryStore, fail, make_publisher, ref

IDLE = PoolStatus(
    slots=2,
    slots_in_use=0,
    slot_waiters=0,
    slot_wait_seconds=0.0,
    quarantined_slots=0,
    hung_writes=0,
    quarantine_full=False,
)


class Seen:
    """All that a publisher has announced so far."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self.staged: list[SampleRef] = []
        self.reports: list[FragmentReport] = []

    def poll(self) -> None:
        progress = self._publisher.poll()
        self.staged += progress.staged
        self.reports += progress.reports

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            self.poll()
            time.sleep(0.001)

    @property
    def errors(self) -> dict[str, str | None]:
        """By sample id, how what was reported has ended."""
        return {report.ref.sample_id: report.error for report in self.reports}


class Rows:
    """A job's `gather` that counts its calls, after doing `first` in each."""

    def __init__(self, source: Gather, first: Callable[[], None] = lambda: None) -> None:
        self._source, self._first = source, first
        self.calls = 0

    def __call__(self, start: int, end: int, out: torch.Tensor) -> None:
        self.calls += 1
        self._first()
        self._source(start, end, out)


def counted(sample_id: str, tokens: int) -> tuple[FragmentJob, Rows]:
    made = job(WHAT, ref(sample_id), 1, tokens)
    rows = Rows(made.gather)
    return replace(made, gather=rows), rows


def now(publisher: Publisher) -> PoolStatus:
    """The status, without the time that even a free slot takes."""
    return replace(publisher.status(), slot_wait_seconds=0.0)


def test_what_is_queued_behind_hung_writes_ends_at_once(
    store: MemoryStore, publisher: Publisher
) -> None:
    hangs = {"h0": Hang(), "h1": Hang()}
    store.on_write = lambda header, number: hangs[header.ref.sample_id]()
    seen = Seen(publisher)
    for name, hang in hangs.items():
        publisher.submit(job(WHAT, ref(name), 1, 20))
        hang.wait_entered()
    queued = [counted(f"q{number}", 20) for number in range(3)]
    for each, _ in queued:
        publisher.submit(each)
    assert publisher.busy() == 5
    # Whatever cancel promises at once is there when it returns.
    publisher.cancel(ref("q1"))
    seen.poll()
    assert seen.staged == [ref("q1")]
    assert seen.errors == {"q1": "Cancelled: cancelled before it was begun"}
    assert now(publisher) == replace(IDLE, slots_in_use=2)
    publisher.cancel(ref("h0"))
    assert now(publisher) == replace(IDLE, slots_in_use=2, quarantined_slots=1, hung_writes=1)
    publisher.cancel(ref("h1"))
    full = replace(IDLE, slots_in_use=2, quarantined_slots=2, hung_writes=2, quarantine_full=True)
    assert now(publisher) == full
    publisher.cancel(ref("q2"))
    publisher.cancel(ref("q0"))
    seen.poll()
    assert seen.staged == [ref("q1"), ref("h0"), ref("h1"), ref("q2"), ref("q0")]
    assert list(seen.errors) == ["q1", "q2", "q0"]
    assert publisher.busy() == 2
    for hang in hangs.values():
        hang.let_go()
    seen.until(lambda: publisher.busy() == 0)
    seen.poll()
    assert len(seen.staged) == len(seen.reports) == 5
    assert sorted(store.aborted) == ["h0", "h1"]
    assert store.data == {}
    assert [header.ref.sample_id for header in store.headers] == ["h0", "h1"]
    assert [rows.calls for _, rows in queued] == [0, 0, 0]
    assert now(publisher) == IDLE


@pytest.mark.parametrize("hangs_in", ["open", "write"])
def test_a_cancelled_job_is_aborted_when_the_store_lets_go_of_it(
    store: MemoryStore, publisher: Publisher, hangs_in: str
) -> None:
    hang = Hang()
    setattr(store, f"on_{hangs_in}", hang)
    seen = Seen(publisher)
    dead, rows = counted("dead", 20)  # five slots
    publisher.submit(dead)
    hang.wait_entered()
    seen.poll()
    assert seen.staged == []
    publisher.cancel(ref("dead"))
    seen.poll()
    assert seen.staged == [ref("dead")]
    assert seen.reports == []
    slots = int(hangs_in == "write")
    expected = replace(IDLE, slots_in_use=slots, quarantined_slots=slots, hung_writes=1)
    assert now(publisher) == expected
    hang.let_go()
    seen.until(lambda: bool(seen.reports))
    (error,) = seen.errors.values()
    assert error is not None
    assert error.startswith("Cancelled: ")
    assert store.aborted == ["dead"]
    assert store.data == {}
    assert rows.calls == slots
    assert now(publisher) == IDLE


def test_pages_of_a_hung_last_write_are_free_and_its_fragment_is_not_finished(
    store: MemoryStore, publisher: Publisher
) -> None:
    hang = Hang()
    store.on_write = hang
    seen = Seen(publisher)
    publisher.submit(job(WHAT, ref(), 1, 4))
    hang.wait_entered()
    # All rows are gathered: nothing more is read from the pages.
    seen.poll()
    assert seen.staged == [ref()]
    publisher.cancel(ref())
    hang.let_go()
    seen.until(lambda: bool(seen.reports))
    assert seen.errors == {"s": "Cancelled: cancelled while it was being written"}
    assert seen.staged == [ref()]
    assert store.aborted == ["s"]
    assert store.data == {}


def test_a_finish_under_way_counts(store: MemoryStore, publisher: Publisher) -> None:
    hang = Hang()
    store.on_finish = hang
    seen = Seen(publisher)
    publisher.submit(job(WHAT, ref(), 1, 4))
    hang.wait_entered()
    publisher.cancel(ref())
    assert now(publisher) == replace(IDLE, hung_writes=1)
    hang.let_go()
    seen.until(lambda: bool(seen.reports))
    assert seen.errors == {"s": None}
    assert ("s", 1) in store.data
    assert store.aborted == []


def test_an_abort_that_hangs_keeps_no_pages(store: MemoryStore, publisher: Publisher) -> None:
    hang = Hang()
    store.on_write = fail(StoreError("disk full"))
    store.on_abort = hang
    seen = Seen(publisher)
    publisher.submit(job(WHAT, ref(), 1, 20))
    hang.wait_entered()
    seen.poll()
    assert seen.staged == [ref()]
    publisher.cancel(ref())
    assert now(publisher) == replace(IDLE, hung_writes=1)
    hang.let_go()
    seen.until(lambda: bool(seen.reports))
    assert seen.errors == {"s": "StoreError: disk full"}
    assert seen.staged == [ref()]


def test_a_job_that_waits_for_a_slot_is_woken(store: MemoryStore) -> None:
    hang = Hang()
    store.on_write = lambda header, number: hang() if header.ref.sample_id == "slow" else None
    publisher = make_publisher(store, slots=1, writer_threads=3)
    seen = Seen(publisher)
    publisher.submit(job(WHAT, ref("slow"), 1, 20))
    hang.wait_entered()
    waiting, rows = counted("waiting", 20)
    publisher.submit(waiting)
    seen.until(lambda: publisher.status().slot_waiters == 1)
    publisher.submit(job(WHAT, ref("next"), 1, 20))
    seen.until(lambda: publisher.status().slot_waiters == 2)
    publisher.cancel(ref("waiting"))
    seen.poll()
    assert seen.staged == [ref("waiting")]
    seen.until(lambda: bool(seen.reports))
    assert seen.errors == {"waiting": "Cancelled: cancelled before it got a slot"}
    assert store.aborted == ["waiting"]
    assert rows.calls == 0
    assert publisher.status().slot_wait_seconds > 0
    assert now(publisher) == replace(IDLE, slots=1, slots_in_use=1, slot_waiters=1)
    hang.let_go()
    seen.until(lambda: len(seen.reports) == 3)
    assert seen.errors == {
        "waiting": "Cancelled: cancelled before it got a slot",
        "slow": None,
        "next": None,
    }
    assert publisher.shutdown(10) == []


def test_pages_that_are_being_read_are_free_when_the_read_returns(
    store: MemoryStore, publisher: Publisher
) -> None:
    hang = Hang()
    seen = Seen(publisher)
    made = job(WHAT, ref(), 1, 20)
    rows = Rows(made.gather, hang)
    publisher.submit(replace(made, gather=rows))
    hang.wait_entered()
    publisher.cancel(ref())
    publisher.cancel(ref())
    time.sleep(0.02)
    seen.poll()
    assert seen.staged == seen.reports == []
    # A slot is held, but not by the store.
    assert now(publisher) == replace(IDLE, slots_in_use=1, quarantined_slots=1)
    hang.let_go()
    seen.until(lambda: bool(seen.reports))
    assert seen.staged == [ref()]
    assert seen.errors == {"s": "Cancelled: cancelled while it was being written"}
    assert rows.calls == 1
    assert store.aborted == ["s"]


def test_pages_are_not_read_any_more_by_a_job_that_has_just_got_its_slot(
    store: MemoryStore, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire = publisher.pool.acquire

    def acquire_and_cancel(ticket: int, cancelled: Callable[[], bool]) -> Slot:
        slot = acquire(ticket, cancelled)
        publisher.cancel(ref())
        return slot

    monkeypatch.setattr(publisher.pool, "acquire", acquire_and_cancel)
    seen = Seen(publisher)
    made, rows = counted("s", 20)
    publisher.submit(made)
    seen.until(lambda: bool(seen.reports))
    assert seen.staged == [ref()]
    assert rows.calls == 0
    assert store.aborted == ["s"]
    assert now(publisher) == IDLE


def test_a_cancel_may_cross_with_the_report_or_come_too_early(
    store: MemoryStore, publisher: Publisher
) -> None:
    publisher.cancel(ref())
    seen = Seen(publisher)
    publisher.submit(job(WHAT, ref(), 1, 4))
    seen.until(lambda: bool(seen.reports))
    assert seen.errors == {"s": None}
    publisher.cancel(ref())
    publisher.cancel(ref("other"))
    seen.poll()
    assert len(seen.staged) == len(seen.reports) == 1
    assert now(publisher) == IDLE


def test_all_fragments_of_an_attempt_are_cancelled_and_no_other_attempt(
    store: MemoryStore, publisher: Publisher
) -> None:
    hang = Hang()
    store.on_write = hang
    seen = Seen(publisher)
    other = SampleRef(run_id="r", sample_id="s", attempt="b")
    for stage, attempt in ((0, ref()), (1, other), (1, ref())):
        publisher.submit(job(WHAT, attempt, stage, 4))
    hang.wait_entered()
    publisher.cancel(ref())
    hang.let_go()
    seen.until(lambda: len(seen.reports) == 3)
    ended = {(report.ref.attempt, report.stage): report.error for report in seen.reports}
    assert {key for key, error in ended.items() if error} == {("a", 0), ("a", 1)}


def test_a_hung_attempt_is_named_at_shutdown(store: MemoryStore) -> None:
    hang = Hang()
    store.on_write = hang
    publisher = make_publisher(store, writer_threads=1)
    publisher.submit(job(WHAT, ref("hung"), 1, 20))
    hang.wait_entered()
    publisher.submit(job(WHAT, ref("queued"), 1, 20))
    publisher.submit(job(WHAT, ref("cancelled"), 1, 20))
    publisher.cancel(ref("hung"))
    publisher.cancel(ref("cancelled"))
    assert publisher.shutdown(0.05) == [ref("hung"), ref("queued")]
    hang.let_go()
    seen = Seen(publisher)
    seen.until(lambda: len(seen.reports) == 3)
    assert store.data == {}


class SlowFiles(FileStoreWriter):
    """A directory whose writes hang behind the rows that they have written."""

    def __init__(self, root: Path, hang: Hang) -> None:
        super().__init__(str(root))
        self._hang = hang

    def open_fragment(self, header: FragmentHeader) -> FragmentWriter:
        writer = super().open_fragment(header)
        write = writer.write

        def write_and_hang(pieces: Sequence[memoryview]) -> None:
            write(pieces)
            self._hang()

        writer.write = write_and_hang  # type: ignore[method-assign]
        return writer


def test_a_directory_keeps_no_file_of_a_cancelled_attempt(tmp_path: Path) -> None:
    def files() -> list[str]:
        return [name for _, _, names in os.walk(tmp_path) for name in names]

    hang = Hang()
    publisher = make_publisher(SlowFiles(tmp_path, hang))
    seen = Seen(publisher)
    publisher.submit(job(WHAT, ref(), 1, 4))
    hang.wait_entered()
    publisher.cancel(ref())
    assert len(files()) == 1
    hang.let_go()
    seen.until(lambda: bool(seen.reports))
    assert files() == []
    assert publisher.shutdown(10) == []


def test_submitters_and_cancellers_may_be_many(store: MemoryStore) -> None:
    publisher = make_publisher(store, slots=1)
    seen = Seen(publisher)

    def submit_and_cancel(who: int) -> None:
        for number in range(50):
            publisher.submit(job(WHAT, ref(f"{who}-{number}"), 1, 9))
            publisher.cancel(ref(f"{who}-{number // 2}"))

    threads = [threading.Thread(target=submit_and_cancel, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    seen.until(lambda: len(seen.reports) == 200)
    assert len(set(seen.staged)) == len(seen.staged) == len(seen.errors) == 200
    assert {sample for sample, error in seen.errors.items() if not error} == {
        sample for sample, _ in store.data
    }
    assert now(publisher) == replace(IDLE, slots=1)
    assert publisher.shutdown(10) == []
