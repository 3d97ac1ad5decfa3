"""The capture loop against a session that behaves like an engine, well or badly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from stagetap.cli.capture_run import LISTED_FAILURES, CaptureRun
from stagetap.cli.disk import SAMPLE_OVERHEAD_BYTES, DiskGuard
from stagetap.engine.session import Captured, EngineStopped, Prompt
from stagetap.errors import Refused, StageTapError
from stagetap.prompts import TokenPrompt

ROW_BYTES = 1000


def prompts(count: int, tokens: int = 10) -> list[TokenPrompt]:
    ids = np.arange(tokens, dtype=np.int32)
    return [TokenPrompt(n, f"s{n}", ids, {"n": n}) for n in range(1, count + 1)]


class Disk:
    """Shrinks by what the session stores."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def guard(self, keep_free_bytes: int = 0, row_bytes: int | None = ROW_BYTES) -> DiskGuard:
        return DiskGuard(Path("/"), keep_free_bytes, row_bytes, lambda _: self.free_bytes)


class FakeSession:
    """Keeps ``in_flight`` prompts and ends the latest first, as a busy engine may."""

    def __init__(
        self,
        disk: Disk,
        bad: Iterable[str] = (),
        raises: Exception | None = None,
        suspends_after: int | None = None,
    ) -> None:
        self.suspends_after = suspends_after  # so many failures
        self.failed = 0
        self.disk = disk
        self.bad = set(bad)
        self.raises = raises
        self.seen: list[Prompt] = []
        self.most_in_flight = 0

    def capture(self, prompts: Iterable[Prompt], in_flight: int = 16) -> Iterator[Captured]:
        waiting = iter(prompts)
        running: list[Prompt] = []
        while True:
            while len(running) < in_flight and (prompt := next(waiting, None)) is not None:
                running.append(prompt)
                self.seen.append(prompt)
                self.most_in_flight = max(self.most_in_flight, len(running))
            if not running:
                return
            yield self._end(running.pop())

    def _end(self, prompt: Prompt) -> Captured:
        assert prompt.sample_id is not None
        if self.raises is not None and len(self.seen) >= 3:
            raise self.raises
        if self.suspends_after is not None and self.failed >= self.suspends_after:
            return Captured(prompt.sample_id, 0, 0, "exporting is suspended", suspended=True)
        if prompt.sample_id in self.bad:
            self.failed += 1
            return Captured(sample_id=prompt.sample_id, tokens=0, bytes=0, error="disk on fire")
        rows = len(prompt.token_ids)
        self.disk.free_bytes -= rows * ROW_BYTES
        return Captured(prompt.sample_id, tokens=rows, bytes=rows * ROW_BYTES, error=None)


def test_all_prompts_go_through() -> None:
    disk = Disk(10**9)
    session = FakeSession(disk)
    seen: list[Captured] = []
    run = CaptureRun(session, prompts(20), disk.guard(), on_sample=seen.append)
    tally = run.run(in_flight=4)
    assert (tally.samples, tally.tokens, tally.bytes) == (20, 200, 200 * ROW_BYTES)
    assert (tally.failed, tally.stopped) == (0, None)
    assert len(seen) == 20
    assert session.most_in_flight == 4
    assert session.seen[4].metadata == {"n": 5}
    assert session.seen[4].token_ids == list(range(10))


def test_a_suspended_engine_is_not_fed_the_rest() -> None:
    disk = Disk(10**9)
    bad = [f"s{n}" for n in range(5, 1000)]
    session = FakeSession(disk, bad, suspends_after=3)
    tally = CaptureRun(session, prompts(999), disk.guard()).run(in_flight=1)
    assert (tally.samples, tally.failed, tally.stopped) == (4, 3, "failures")
    assert len(session.seen) == 8


def test_failures_are_counted_and_listed() -> None:
    disk = Disk(10**9)
    bad = [f"s{n}" for n in range(1, 31)]
    tally = CaptureRun(FakeSession(disk, bad), prompts(40), disk.guard()).run(in_flight=8)
    assert (tally.samples, tally.failed) == (10, 30)
    assert len(tally.failures) == LISTED_FAILURES
    assert tally.failures[0].error == "disk on fire"


@pytest.mark.parametrize("in_flight", [1, 8])
@pytest.mark.parametrize("known", [True, False])
def test_the_disk_is_never_filled(in_flight: int, known: bool) -> None:
    keep_free = 50_000
    disk = Disk(keep_free + 2 * 8 * (SAMPLE_OVERHEAD_BYTES + 10 * ROW_BYTES) + 200_000)
    guard = disk.guard(keep_free, ROW_BYTES if known else None)
    tally = CaptureRun(FakeSession(disk), prompts(1000), guard).run(in_flight)
    assert tally.stopped == "disk"
    assert 0 < tally.samples < 1000
    assert disk.free_bytes >= keep_free


def test_output_rows_count_for_the_disk() -> None:
    disk = Disk(SAMPLE_OVERHEAD_BYTES + 500 * ROW_BYTES)
    assert CaptureRun(FakeSession(disk), prompts(1), disk.guard()).run(1).samples == 1
    disk.free_bytes = SAMPLE_OVERHEAD_BYTES + 500 * ROW_BYTES
    run = CaptureRun(FakeSession(disk), prompts(1), disk.guard(), output_rows=491)
    assert run.run(1).stopped == "disk"


def test_a_wish_to_stop_lets_what_is_in_flight_end() -> None:
    disk = Disk(10**9)
    session = FakeSession(disk)
    tally = CaptureRun(
        session, prompts(100), disk.guard(), wants_stop=lambda: len(session.seen) >= 12
    ).run(in_flight=4)
    assert tally.stopped == "interrupt"
    assert tally.samples == 12 == len(session.seen)


@pytest.mark.parametrize("died", [RuntimeError("no memory"), EngineStopped("no memory")])
def test_an_engine_that_dies_by_itself(died: Exception) -> None:
    disk = Disk(10**9)
    run = CaptureRun(FakeSession(disk, raises=died), prompts(9), disk.guard())
    with pytest.raises(
        StageTapError,
        match=r"^the engine stopped: no memory; what is committed stays, 2 samples .* --resume",
    ):
        run.run(in_flight=1)
    assert run.tally.samples == 2


def test_a_prompt_that_the_engine_refuses_is_named_by_line() -> None:
    disk = Disk(10**9)
    run = CaptureRun(FakeSession(disk, raises=Refused("too long")), prompts(9), disk.guard())
    with pytest.raises(
        StageTapError, match="line 3: too long; what is committed stays, 2 samples"
    ) as raised:
        run.run(in_flight=1)
    assert not isinstance(raised.value, Refused)
