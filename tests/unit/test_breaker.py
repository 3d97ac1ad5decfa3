"""The circuit breaker: opens after so many failures in a row, and finds its way back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stagetap.breaker import PROBE_SECONDS, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def tripped(limit: int = 3) -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(limit, clock)
    for number in range(limit):
        assert breaker.admit(str(number)) is None
        breaker.failed(str(number), f"cause {number}")
    return breaker, clock


def test_opens_at_the_limit_with_the_last_cause() -> None:
    breaker, _ = tripped(3)
    assert breaker.state == "open"
    refusal = breaker.admit("next")
    assert refusal is not None
    assert "3 failed samples in a row" in refusal
    assert "cause 2" in refusal


def test_a_commit_in_between_starts_the_count_anew() -> None:
    breaker = Breaker(2, Clock())
    for number in range(10):
        breaker.failed(str(number), "cause")
        breaker.committed(f"{number}+")
    assert breaker.state == "closed"


def test_lets_one_probe_through_at_a_time() -> None:
    breaker, clock = tripped()
    clock.now += PROBE_SECONDS
    assert breaker.state == "half_open"
    assert breaker.admit("probe") is None
    assert breaker.admit("beside") is not None
    breaker.failed("probe", "still broken")
    assert breaker.state == "open"
    assert "still broken" in str(breaker.admit("soon"))
    clock.now += PROBE_SECONDS
    assert breaker.admit("second probe") is None
    breaker.committed("second probe")
    assert breaker.state == "closed"
    assert breaker.admit("after") is None


def test_a_probe_that_is_aborted_makes_room_for_another() -> None:
    breaker, clock = tripped()
    clock.now += PROBE_SECONDS
    assert breaker.admit("probe") is None
    breaker.abandoned("probe")
    assert breaker.admit("another") is None


def test_zero_never_opens() -> None:
    breaker = Breaker(0, Clock())
    for number in range(100):
        breaker.failed(str(number), "cause")
    assert breaker.state == "closed"
    assert breaker.admit("next") is None


def test_who_holds_it_decides_when_it_closes() -> None:
    clock = Clock()
    breaker = Breaker(3, clock)
    breaker.hold("stage 0", "4 writes hang")
    breaker.hold("stage 1", "2 writes hang")
    clock.now += 100 * PROBE_SECONDS
    assert breaker.state == "open"
    assert "4 writes hang" in str(breaker.admit("next"))
    breaker.release("stage 0")
    assert "2 writes hang" in str(breaker.admit("next"))
    breaker.release("stage 1")
    breaker.release("stage 1")
    assert breaker.admit("next") is None


@given(st.lists(st.sampled_from(["ok", "fail", "abort", "wait"]), max_size=60), st.integers(1, 4))
def test_it_always_finds_its_way_back(events: list[str], limit: int) -> None:
    clock = Clock()
    breaker = Breaker(limit, clock)
    for number, event in enumerate(events):
        if event == "wait":
            clock.now += PROBE_SECONDS
        elif breaker.admit(str(number)) is None:
            {
                "ok": lambda: breaker.committed(str(number)),  # noqa: B023 -- called at once
                "fail": lambda: breaker.failed(str(number), "cause"),  # noqa: B023
                "abort": lambda: breaker.abandoned(str(number)),  # noqa: B023
            }[event]()
    clock.now += PROBE_SECONDS
    assert breaker.admit("probe") is None
    breaker.committed("probe")
    assert breaker.state == "closed"
