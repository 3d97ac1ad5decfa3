"""Who is let in: what only the scheduler's process knows about a new exporting request.

Nothing here knows the states of samples. The table (`scheduler_side.py`) says which ids are under
way, and hands over the commits that it has given up.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from stagetap.engine.outcome import Outcome
from stagetap.engine.requests import stagetap_params
from stagetap.engine.store_thread import StoreThread
from stagetap.errors import Refused, StageTapError, StoreError
from stagetap.options import RequestOptions, request_options

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from stagetap.breaker import Breaker
    from stagetap.engine.metrics import StatsOutbox
    from stagetap.stores.base import StoreCommitter

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name

LOOK_SECONDS = 5.0
"""How long one look whether a sample is committed may hold up the engine."""


@dataclass(frozen=True)
class Admitted:
    """A request that may run and export, under this sample id."""

    sample_id: str
    options: RequestOptions


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
        self._hung_look: Future[bool] | None = None
        self._hung_commits: dict[str, Future[None]] = {}  # by the sample id that they hold

    def ask(self, request: Request) -> Admitted | Outcome | None:
        """What becomes of a new request: it exports, it must not run, or it is an ordinary one.

        The front end has checked its options; what only this process knows is checked here: a
        sample that is committed already, or under way, and whether exporting is suspended.
        """
        params = stagetap_params(request.kv_transfer_params)
        if params is None:
            return None
        try:
            options = request_options(params)
        except Refused as error:
            return self._turned_away(request, None, str(error), HTTPStatus.BAD_REQUEST)
        if not options.export:
            return None
        sample_id = options.sample_id or uuid.uuid4().hex
        if (problem := self._too_large(request.num_prompt_tokens)) is not None:
            return self._turned_away(request, sample_id, problem, HTTPStatus.BAD_REQUEST)
        self.look_after_hung_calls()
        why_suspended = self._breaker.admit(request.request_id)
        if why_suspended is not None:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return self._turned_away(request, sample_id, why_suspended, status, suspended=True)
        try:
            self._refuse_duplicate(sample_id)
        except StageTapError as error:
            self._breaker.abandoned(request.request_id)
            if isinstance(error, Refused):
                return self._turned_away(request, sample_id, str(error), HTTPStatus.BAD_REQUEST)
            cause = f"sample {sample_id!r}, store {self._address}: {error}"
            self._breaker.failed(request.request_id, cause)
            return self._turned_away(request, sample_id, cause, HTTPStatus.INTERNAL_SERVER_ERROR)
        return Admitted(sample_id, options)

    def _turned_away(
        self,
        request: Request,
        sample_id: str | None,
        cause: str,
        status: HTTPStatus,
        *,
        suspended: bool = False,
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
        if suspended:
            params["suspended"] = True
        return Outcome(request.request_id, params)

    def _refuse_duplicate(self, sample_id: str) -> None:
        """Raise Refused when the id is taken, StoreError when the store does not say."""
        if sample_id in self._hung_commits:
            raise Refused(
                f"a commit of sample {sample_id!r} was given up, but the store has not answered "
                "yet, so it may still appear; wait, or choose another sample_id"
            )
        if self._under_way(sample_id):
            raise Refused(
                f"sample {sample_id!r} is under way in another request; one exporting request is "
                "one sample: give each prompt its own sample_id"
            )
        look = self._looker.submit(self._store.is_committed, self._run_id, sample_id)
        try:
            committed = look.result(LOOK_SECONDS)
        except TimeoutError:
            why = f"the store {self._address} does not answer"
            self._hung_look = look
            self._breaker.hold("look", f"{why}; it resumes by itself when it does")
            raise StoreError(f"{why} within {LOOK_SECONDS:g} s") from None
        if committed:
            raise Refused(
                f"sample {sample_id!r} is committed in run {self._run_id}; choose another sample_id"
            )

    # Calls that the store has not answered ---------------------------------------------------

    def hold_id(self, sample_id: str, commit: Future[None]) -> None:
        """A commit was given up while the store had it: its sample id is taken until it ends."""
        self._hung_commits[sample_id] = commit

    def look_after_hung_calls(self) -> None:
        """Whether the store has answered what was given up."""
        if self._hung_look is not None and self._hung_look.done():
            self._hung_look = None
            self._breaker.release("look")
        for name, commit in list(self._hung_commits.items()):
            if commit.done():
                del self._hung_commits[name]
                logger.warning(
                    "stagetap: the commit of sample %r that was given up has ended: %s",
                    name,
                    commit.exception() or "it was committed",
                )

    @property
    def held_ids(self) -> int:
        """How many sample ids are taken by a commit that was given up."""
        return len(self._hung_commits)
