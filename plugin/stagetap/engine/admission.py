"""Who is let in: what only the scheduler's process knows about a new exporting request.

Nothing here knows the states of samples. The table (`scheduler_side.py`) says which ids are under
way, and hands over the commits that it has given up.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from stagetap.breaker import PROBE_SECONDS
from stagetap.engine.outcome import Outcome
from stagetap.engine.requests import stagetap_params
from stagetap.engine.store_thread import StoreThread
from stagetap.errors import Refused
from stagetap.options import RequestOptions, request_options

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stagetap.breaker import Breaker
    from stagetap.engine.metrics import StatsOutbox
    from stagetap.stores.base import StoreCommitter

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name

HOLD_UP_SECONDS = 0.05
"""How long one look whether a sample is committed may hold up the engine. A store that is well
answers in it, and requests run in the order in which they came; for a slower one only they wait.
"""

LOOK_SECONDS = 5.0
"""How long one look may take before exporting is suspended."""


@dataclass(frozen=True)
class Admitted:
    """A request that may export under this sample id, and run once `look` has been heard.

    Attributes:
        look: whether the sample is committed; None when it is known that it is not.
    """

    sample_id: str
    options: RequestOptions
    look: Future[bool] | None


class Admission:
    """Lets a new exporting request in, or turns it away before any forward pass.

    Args:
        run_id: the run in which a sample id may be committed once.
        store: asked whether a sample is committed.
        address: the store's, for messages.
        breaker: whether exporting is suspended; the table tells it how samples end.
        outbox: counts who is turned away.
        under_way: whether a sample of this id is in the table.
        too_large: why the store can never hold a sample of so many tokens, if it cannot.
    """

    def __init__(
        self,
        *,
        run_id: str,
        store: StoreCommitter,
        address: str,
        breaker: Breaker,
        outbox: StatsOutbox,
        under_way: Callable[[str], bool],
        too_large: Callable[[int], str | None],
    ):
        self._run_id = run_id
        self._store = store
        self._address = address
        self._breaker = breaker
        self._outbox = outbox
        self._under_way = under_way
        self._too_large = too_large
        self._looker = StoreThread("stagetap-look")
        self._look_began: float | None = None  # when the look that runs now did
        self._probe: Future[None] | None = None  # done when a store that did not answer does
        self._why_suspended = ""
        self._hung_commits: dict[str, Future[None]] = {}  # by the sample id that they hold

    def ask(self, request: Request) -> Admitted | Outcome | None:
        """What becomes of a new request: it exports, it must not run, or it is an ordinary one.

        The front end has checked its options; what only this process knows is checked here: a
        sample that is committed already, or under way, and whether exporting is suspended. Where
        the store does not say the first at once, `hear` says it later.
        """
        params = stagetap_params(request.kv_transfer_params)
        if params is None:
            return None
        request_id = request.request_id
        try:
            options = request_options(params)
        except Refused as error:
            return self._turned_away(request_id, None, str(error), HTTPStatus.BAD_REQUEST)
        if not options.export:
            return None
        self.look_after_hung_calls()
        sample_id = options.sample_id or uuid.uuid4().hex
        problem = self._too_large(request.num_prompt_tokens) or self._why_taken(sample_id)
        if problem is not None:
            return self._turned_away(request_id, sample_id, problem, HTTPStatus.BAD_REQUEST)
        why_suspended = self._breaker.admit(request_id)
        if why_suspended is not None:
            return self._suspended(request_id, sample_id, why_suspended)
        looker_is_free = self._look_began is None
        look = self._looker.submit(self._look, sample_id)
        if looker_is_free:
            wait([look], HOLD_UP_SECONDS)
        if not look.done():
            return Admitted(sample_id, options, look)
        return self._verdict(request_id, sample_id, look) or Admitted(sample_id, options, None)

    def hear(
        self, request_id: str, sample_id: str, look: Future[bool], *, time_is_over: bool
    ) -> Outcome | None:
        """Why a request that waits for its look must not run, if that is known now.

        None lets it run when its look was done before this was asked, else it waits on. Never None
        for a look that is not done when `time_is_over`.
        """
        if look.done():
            error = look.exception()
            if error is not None:
                self._suspend(f"the store {self._address} does not say what is committed: {error}")
            return self._verdict(request_id, sample_id, look)
        if self._probe is not None:
            if look.cancel():
                self._breaker.abandoned(request_id)
                why = f"exporting is suspended: {self._why_suspended}"
                return self._suspended(request_id, sample_id, why)
            return self._failed(request_id, sample_id, self._why_suspended)
        if time_is_over:
            look.cancel()
            why = (
                f"the store {self._address} did not say in time whether it is committed, and the "
                "engine is shutting down; send it to the next one"
            )
            return self._failed(request_id, sample_id, why)
        return None

    def _verdict(self, request_id: str, sample_id: str, look: Future[bool]) -> Outcome | None:
        """What a look that is done has found: the id is free, it is taken, or nobody knows."""
        error = look.exception()
        if error is not None:
            return self._failed(request_id, sample_id, f"store {self._address}: {error}")
        if not look.result():
            return None
        self._breaker.abandoned(request_id)
        cause = f"sample {sample_id!r} is committed in run {self._run_id}; choose another sample_id"
        return self._turned_away(request_id, sample_id, cause, HTTPStatus.BAD_REQUEST)

    def _failed(self, request_id: str, sample_id: str, why: str) -> Outcome:
        cause = f"sample {sample_id!r}, {why}"
        logger.error("stagetap: %s", cause)
        self._breaker.failed(request_id, cause)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        return self._turned_away(request_id, sample_id, cause, status)

    def _suspended(self, request_id: str, sample_id: str, why: str) -> Outcome:
        status = HTTPStatus.SERVICE_UNAVAILABLE
        outcome = self._turned_away(request_id, sample_id, why, status)
        outcome.params["suspended"] = True
        return outcome

    def _turned_away(
        self, request_id: str, sample_id: str | None, cause: str, status: HTTPStatus
    ) -> Outcome:
        store_failed = status is HTTPStatus.INTERNAL_SERVER_ERROR
        self._outbox.stats.count_sample("failed" if store_failed else "refused")
        params: dict[str, Any] = {
            "sample_id": sample_id,
            "run_id": self._run_id,
            "state": "failed",
            "error": cause,
            "status": int(status),
        }
        return Outcome(request_id, params)

    def _why_taken(self, sample_id: str) -> str | None:
        """Why nobody can have this id, as far as this process knows."""
        if sample_id in self._hung_commits:
            return (
                f"a commit of sample {sample_id!r} was given up, but the store has not answered "
                "yet, so it may still appear; wait, or choose another sample_id"
            )
        if self._under_way(sample_id):
            return (
                f"sample {sample_id!r} is under way in another request; one exporting request is "
                "one sample: give each prompt its own sample_id"
            )
        return None

    # Calls that the store has not answered ---------------------------------------------------

    def hold_id(self, sample_id: str, commit: Future[None]) -> None:
        """A commit was given up while the store had it: its sample id is taken until it ends."""
        self._hung_commits[sample_id] = commit

    def look_after_hung_calls(self) -> None:
        """Whether a look takes too long, and whether the store has answered what was given up."""
        began = self._look_began
        if began is not None and time.monotonic() - began > LOOK_SECONDS:
            self._suspend(f"the store {self._address} does not answer within {LOOK_SECONDS:g} s")
        if self._probe is not None and self._probe.done():
            self._probe = None
            self._breaker.release("look")
            logger.warning("stagetap: the store %s answers again", self._address)
        for name, commit in list(self._hung_commits.items()):
            if commit.done():
                del self._hung_commits[name]
                logger.warning(
                    "stagetap: the commit of sample %r that was given up has ended: %s",
                    name,
                    commit.exception() or "it was committed",
                )

    def _look(self, sample_id: str) -> bool:
        """Ask the store; in the looker's thread."""
        self._look_began = time.monotonic()
        try:
            return self._store.is_committed(self._run_id, sample_id)
        finally:
            self._look_began = None

    def _suspend(self, why: str) -> None:
        """Let nobody in until the store answers: each look could take as long as this one."""
        if self._probe is not None:
            return
        self._why_suspended = f"{why}; it resumes by itself when the store does"
        self._breaker.hold("look", self._why_suspended)
        self._probe = self._looker.submit(self._look_until_answered)

    def _look_until_answered(self) -> None:
        """Ask for a sample that nobody has; in the looker's thread."""
        while True:
            try:
                self._store.is_committed(self._run_id, uuid.uuid4().hex)
            except Exception:  # noqa: BLE001 -- the store does not work yet, whatever it says
                time.sleep(PROBE_SECONDS)
            else:
                return

    @property
    def held_ids(self) -> int:
        """How many sample ids are taken by a commit that was given up."""
        return len(self._hung_commits)
