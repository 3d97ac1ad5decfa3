"""Submits, cancels, hangs and failures in any order: what always holds."""

import random
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest
import torch

from stagetap.errors import StoreError
from stagetap.publish.publisher import FragmentJob
from stagetap.stores.base import FragmentHeader, SampleRef
from store_samples import job
from unit.publish.memory_store import WHAT, Hang, MemoryStore, make_publisher, ref

JOBS = 60


class Weather:
    """What befalls each call of each job, drawn from a seed, and what was seen meanwhile."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self.hangs: list[Hang] = []
        self.reading: set[SampleRef] = set()
        self.staged: set[SampleRef] = set()
        self.cancelled: set[SampleRef] = set()
        self.calls_after_cancel: Counter[tuple[str, str]] = Counter()
        self.read_when_free: list[SampleRef] = []

    def befalls(self, who: SampleRef, call: str) -> None:
        """Return, at once or late; hang until let go; or fail."""
        kind = call.split()[0]
        with self._lock:
            if who in self.cancelled:
                self.calls_after_cancel[who.sample_id, kind] += 1
            drawn = random.Random(f"{self._seed} {who.sample_id} {call}").random()
            hang = Hang()
            if drawn < 0.08:
                self.hangs.append(hang)
        if drawn < 0.08:
            hang()
        elif drawn < 0.12:
            raise StoreError("bad weather")
        elif drawn < 0.5:
            time.sleep(drawn / 500)

    def let_go(self, which: random.Random | None) -> None:
        """Let one hanging call go on, or all."""
        with self._lock:
            chosen = self.hangs if which is None else which.sample(self.hangs, len(self.hangs) > 0)
            for hang in list(chosen):
                hang.let_go()
                self.hangs.remove(hang)

    def store(self) -> MemoryStore:
        store = MemoryStore()

        def on_write(header: FragmentHeader, number: int) -> None:
            self.befalls(header.ref, f"write {number}")

        store.on_open = lambda header: self.befalls(header.ref, "open")
        store.on_write = on_write
        store.on_finish = lambda header: self.befalls(header.ref, "finish")
        store.on_abort = lambda header: self.befalls(header.ref, "abort")
        return store

    def job(self, who: SampleRef, tokens: int) -> FragmentJob:
        made = job(WHAT, who, 1, tokens)

        def gather(start: int, end: int, out: torch.Tensor) -> None:
            with self._lock:
                self.reading.add(who)
                if who in self.staged:
                    self.read_when_free.append(who)
            try:
                self.befalls(who, f"gather {start}")
                made.gather(start, end, out)
            finally:
                with self._lock:
                    self.reading.remove(who)

        return replace(made, gather=gather)

    def announce(self, staged: list[SampleRef]) -> None:
        with self._lock:
            self.read_when_free += [who for who in staged if who in self.reading]
            self.staged |= set(staged)


@pytest.mark.parametrize("seed", range(6))
def test_every_job_is_staged_once_and_ends_once(seed: int) -> None:
    rng = random.Random(seed)
    weather = Weather(seed)
    store = weather.store()
    publisher = make_publisher(store, slots=rng.randint(1, 3), writer_threads=rng.randint(1, 4))
    staged: list[SampleRef] = []
    errors: dict[str, str | None] = {}
    reports = submitted = 0
    deadline = time.monotonic() + 60
    while reports < JOBS:
        assert time.monotonic() < deadline, publisher.status()
        action = rng.random()
        if action < 0.3 and submitted < JOBS:
            publisher.submit(weather.job(ref(str(submitted)), rng.randint(1, 14)))
            submitted += 1
        elif action < 0.5 and submitted:
            who = ref(str(rng.randrange(max(0, submitted - 8), submitted)))
            publisher.cancel(who)
            weather.cancelled.add(who)
        elif action < 0.6:
            weather.let_go(rng)
        else:
            time.sleep(0.0005)
        status = publisher.status()
        assert 0 <= status.quarantined_slots <= status.slots
        assert 0 <= status.hung_writes <= 4
        progress = publisher.poll()
        weather.announce(progress.staged)
        staged += progress.staged
        reports += len(progress.reports)
        errors |= {report.ref.sample_id: report.error for report in progress.reports}
        for report in progress.reports:
            assert (report.fragment is None) == (report.error is not None)
            assert report.ref in weather.staged
    weather.let_go(None)
    everybody = {str(number) for number in range(JOBS)}
    assert reports == JOBS
    assert errors.keys() == everybody
    assert sorted(who.sample_id for who in staged) == sorted(everybody)
    assert weather.read_when_free == []
    # A call that passed the last check may be seen to begin behind the cancel; none after it is.
    begun = [weather.calls_after_cancel[sample, "gather"] for sample in everybody]
    begun += [weather.calls_after_cancel[sample, "write"] for sample in everybody]
    assert max(begun) <= 1
    whole = {sample for sample, error in errors.items() if error is None}
    assert {sample for sample, _ in store.data} == whole
    opened = Counter(header.ref.sample_id for header in store.headers)
    assert Counter(store.aborted) == {s: n for s, n in opened.items() if s not in whole}
    assert 0 < len(whole) < JOBS
    assert publisher.busy() == 0
    assert publisher.pool.in_use == 0
    status = publisher.status()
    assert (status.quarantined_slots, status.hung_writes, status.slot_waiters) == (0, 0, 0)
    assert not status.quarantine_full
    assert publisher.shutdown(10) == []
    assert publisher.poll().staged == publisher.poll().reports == []
