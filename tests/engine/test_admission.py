"""Who is let in, asked without an engine: the table says what is under way, the store what is done.

vLLM is imported, but no engine is started.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from types import SimpleNamespace
from typing import Any

import pytest

from stagetap.breaker import PROBE_SECONDS, Breaker
from stagetap.engine import admission
from stagetap.engine.admission import HOLD_UP_SECONDS, Admission, Admitted
from stagetap.engine.metrics import StatsOutbox
from stagetap.engine.outcome import Outcome
from stagetap.errors import StoreError

pytestmark = pytest.mark.engine

FAILURE_LIMIT = 2
MOST_TOKENS = 100


class Store:
    """Says what is committed, fails, or does not answer."""

    def __init__(self) -> None:
        self.committed: set[str] = set()
        self.error: StoreError | None = None
        self.answers = threading.Event()
        self.answers.set()
        self.looks: list[str] = []

    def is_committed(self, run_id: str, sample_id: str) -> bool:
        self.looks.append(sample_id)
        assert self.answers.wait(30)
        if self.error is not None:
            raise self.error
        return sample_id in self.committed


class Entrance:
    """An admission with all that it asks, in the test's hands."""

    def __init__(self) -> None:
        self.now = 100.0
        self.store = Store()
        self.breaker = Breaker(FAILURE_LIMIT, lambda: self.now)
        self.outbox = StatsOutbox()
        self.under_way: set[str] = set()
        self.waiting: dict[str, tuple[str, Future[bool]]] = {}  # by request id
        self.admission = Admission(
            run_id="run",
            store=self.store,  # type: ignore[arg-type]
            address="/store",
            breaker=self.breaker,
            outbox=self.outbox,
            under_way=self.under_way.__contains__,
            too_large=lambda tokens: f"{tokens} tokens" if tokens > MOST_TOKENS else None,
        )

    def ask(self, request_id: str, **stagetap: Any) -> Any:
        request = SimpleNamespace(
            request_id=request_id,
            num_prompt_tokens=stagetap.pop("tokens", 1),
            kv_transfer_params={"stagetap": stagetap},
        )
        return self.admission.ask(request)  # type: ignore[arg-type]

    def waits(self, request_id: str, sample_id: str) -> None:
        """Ask, of a store that does not answer at once."""
        admitted = self.ask(request_id, sample_id=sample_id)
        assert isinstance(admitted, Admitted)
        assert admitted.look is not None
        self.waiting[request_id] = (sample_id, admitted.look)

    def hear(self, request_id: str, *, time_is_over: bool = False) -> Outcome | None:
        """What a step hears of a request that waits."""
        self.admission.look_after_hung_calls()
        sample_id, look = self.waiting[request_id]
        return self.admission.hear(request_id, sample_id, look, time_is_over=time_is_over)

    def answer(self) -> None:
        """The store answers, and all who wait have been looked for."""
        self.store.answers.set()
        wait([look for _, look in self.waiting.values()], 30)

    def turned_away(self, request_id: str, **stagetap: Any) -> dict[str, Any]:
        """What a request is told that must not run, at once or after it waited."""
        waited = request_id in self.waiting
        outcome = self.hear(request_id) if waited else self.ask(request_id, **stagetap)
        assert isinstance(outcome, Outcome)
        assert outcome.failed
        assert outcome.request_id == request_id
        assert outcome.params["run_id"] == "run"
        return outcome.params

    def counted(self, outcome: str) -> int:
        return int(self.outbox.stats.data["samples"][outcome])


@pytest.fixture
def entrance() -> Entrance:
    return Entrance()


@pytest.mark.parametrize("params", [None, {}, {"other": 1}, {"stagetap": {"export": False}}])
def test_an_ordinary_request_asks_nobody(entrance: Entrance, params: Any) -> None:
    request: Any = SimpleNamespace(request_id="r", kv_transfer_params=params)
    assert entrance.admission.ask(request) is None
    assert entrance.store.looks == []
    assert entrance.outbox.stats.is_empty()


def test_an_exporting_request_is_let_in_under_its_id_or_a_new_one(entrance: Entrance) -> None:
    named = entrance.ask("r1", sample_id="a", prefill_only=True)
    assert isinstance(named, Admitted)
    assert named.sample_id == "a"
    assert named.look is None, "a store that is well holds no request back"
    assert named.options.prefill_only
    generated = {entrance.ask(f"r{n}").sample_id for n in range(2, 5)}
    assert len(generated) == 3
    assert entrance.outbox.stats.is_empty()


def test_wrong_options_that_no_front_end_checked_are_refused(entrance: Entrance) -> None:
    said = entrance.turned_away("r", sampel_id="a")
    assert (said["status"], said["sample_id"]) == (400, None)
    assert "sampel_id" in said["error"]
    assert entrance.counted("refused") == 1


def test_what_the_store_can_never_hold_is_refused_before_it_is_asked(entrance: Entrance) -> None:
    assert isinstance(entrance.ask("r1", sample_id="a", tokens=MOST_TOKENS), Admitted)
    said = entrance.turned_away("r2", sample_id="b", tokens=MOST_TOKENS + 1)
    assert (said["status"], said["error"]) == (400, f"{MOST_TOKENS + 1} tokens")
    assert entrance.store.looks == ["a"]
    assert entrance.counted("refused") == 1


def test_an_id_that_is_under_way_or_committed_is_refused(entrance: Entrance) -> None:
    entrance.under_way.add("a")
    said = entrance.turned_away("r1", sample_id="a")
    assert (said["status"], said["sample_id"]) == (400, "a")
    assert "under way in another request" in said["error"]
    assert entrance.store.looks == []
    entrance.under_way.remove("a")
    entrance.store.committed.add("a")
    said = entrance.turned_away("r2", sample_id="a")
    assert said["status"] == 400
    assert "committed in run run" in said["error"]
    assert entrance.counted("refused") == 2


def test_a_commit_that_was_given_up_holds_its_id_until_it_ends(entrance: Entrance) -> None:
    commit: Future[None] = Future()
    entrance.admission.hold_id("a", commit)
    assert entrance.admission.held_ids == 1
    said = entrance.turned_away("r1", sample_id="a")
    assert said["status"] == 400
    assert "may still appear" in said["error"]
    assert isinstance(entrance.ask("r2", sample_id="b"), Admitted)
    commit.set_exception(StoreError("disk full"))
    assert isinstance(entrance.ask("r3", sample_id="a"), Admitted)
    assert entrance.admission.held_ids == 0


def test_a_store_that_cannot_say_fails_the_sample_and_counts_for_the_breaker(
    entrance: Entrance,
) -> None:
    entrance.store.error = StoreError("no such folder")
    for number in range(FAILURE_LIMIT):
        said = entrance.turned_away(f"r{number}", sample_id="a")
        assert said["status"] == 500
        assert "suspended" not in said
        assert said["error"] == "sample 'a', store /store: no such folder"
    assert entrance.counted("failed") == FAILURE_LIMIT
    said = entrance.turned_away("next", sample_id="b")
    assert said["status"] == 503
    assert said["suspended"] is True
    assert "no such folder" in said["error"]
    assert entrance.counted("refused") == 1


def test_a_look_that_takes_its_time_holds_up_only_its_request(entrance: Entrance) -> None:
    entrance.store.committed.add("taken")
    entrance.store.answers.clear()
    began = time.monotonic()
    entrance.waits("r0", "a")
    held_up = time.monotonic()
    assert held_up - began >= HOLD_UP_SECONDS
    for number in range(1, 20):
        entrance.waits(f"r{number}", f"a{number}")
    entrance.waits("duplicate", "taken")
    assert time.monotonic() - held_up < 10 * HOLD_UP_SECONDS, "behind a slow look nobody waits"
    assert entrance.hear("r0") is None
    entrance.answer()
    for number in range(20):
        assert entrance.hear(f"r{number}") is None
    assert entrance.turned_away("duplicate")["status"] == 400
    assert entrance.breaker.state == "closed"


def test_a_late_no_to_say_suspends_exporting_until_the_store_answers(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master that is gone: each look would wait for it as long as the first one."""
    monkeypatch.setattr(admission, "PROBE_SECONDS", 0.05)
    entrance.store.answers.clear()
    entrance.waits("r1", "a")
    entrance.store.error = StoreError("the master does not answer")
    entrance.answer()
    said = entrance.turned_away("r1")
    assert said["status"] == 500
    assert said["error"] == "sample 'a', store /store: the master does not answer"
    said = entrance.turned_away("r2", sample_id="b")
    assert (said["status"], said["suspended"]) == (503, True)
    for part in ("suspended", "/store", "the master does not answer", "resumes by itself"):
        assert part in said["error"]
    assert "b" not in entrance.store.looks
    entrance.store.error = None
    closed(entrance)
    assert isinstance(entrance.ask("r3", sample_id="b"), Admitted)


def test_a_store_that_does_not_answer_suspends_exporting_until_it_does(
    entrance: Entrance, monkeypatch: pytest.MonkeyPatch
) -> None:
    entrance.store.answers.clear()
    entrance.waits("r1", "a")
    entrance.waits("r2", "b")
    assert entrance.hear("r1") is entrance.hear("r2") is None
    monkeypatch.setattr(admission, "LOOK_SECONDS", 0.0)
    said = entrance.turned_away("r1")
    assert said["status"] == 500
    assert "does not answer within 0 s" in said["error"]
    said = entrance.turned_away("r2")
    assert (said["status"], said["suspended"]) == (503, True)
    assert "does not answer within 0 s" in said["error"]
    entrance.now += 100 * PROBE_SECONDS
    assert entrance.turned_away("r3", sample_id="c")["status"] == 503
    assert entrance.store.looks == ["a"], "a store that hangs is not asked again"
    monkeypatch.setattr(admission, "LOOK_SECONDS", 30.0)
    entrance.answer()
    closed(entrance)
    assert isinstance(entrance.ask("r4", sample_id="b"), Admitted)


def test_who_waits_when_the_engine_stops_fails_by_name(entrance: Entrance) -> None:
    entrance.store.answers.clear()
    entrance.waits("r1", "a")
    outcome = entrance.hear("r1", time_is_over=True)
    assert outcome is not None
    assert outcome.params["status"] == 500
    for part in ("'a'", "/store", "shutting down"):
        assert part in outcome.params["error"]
    entrance.answer()


def closed(entrance: Entrance) -> None:
    """Look, as each step does, until exporting is not suspended any more."""
    deadline = time.monotonic() + 30
    while entrance.breaker.state != "closed":
        assert time.monotonic() < deadline
        entrance.admission.look_after_hung_calls()


def test_a_duplicate_does_not_use_up_the_probe(entrance: Entrance) -> None:
    for number in range(FAILURE_LIMIT):
        entrance.breaker.failed(str(number), "cause")
    entrance.now += PROBE_SECONDS
    entrance.under_way.add("a")
    assert entrance.turned_away("r1", sample_id="a")["status"] == 400
    assert isinstance(entrance.ask("r2", sample_id="b"), Admitted)
    assert entrance.turned_away("r3", sample_id="c")["status"] == 503
