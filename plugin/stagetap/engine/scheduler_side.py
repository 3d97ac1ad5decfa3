"""The connector's half in the scheduler: one table of samples, and who may commit.

States of an attempt: ASKED (whether its id is taken) -> PENDING (its request runs) -> SAVING (its
stages publish) -> COMMITTING -> committed, refused, failed or aborted; docs/lifecycle.md says who
owns each transition. This table is the only place that knows them.
"""

from __future__ import annotations

import enum
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from stagetap.breaker import Breaker
from stagetap.engine.admission import Admission, Admitted
from stagetap.engine.agreement import agree
from stagetap.engine.checkpoint import checkpoint_fingerprint
from stagetap.engine.messages import SaveOrder, WorkerFacts, WorkerNews
from stagetap.engine.metrics import StageTapStats, StatsOutbox
from stagetap.engine.orphan import end_with_parent
from stagetap.engine.outcome import Outcome
from stagetap.engine.store_thread import StoreThread
from stagetap.errors import StageTapError
from stagetap.manifest import (
    DTYPE_ITEMSIZE,
    MANIFEST_VERSION,
    Fragment,
    Manifest,
    Tapped,
    sample_bytes,
    token_digest,
)
from stagetap.options import PARAMS_KEY, ConnectorOptions, RequestOptions
from stagetap.stores.base import SampleRef, capacity_bytes, open_store_committer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name

COMMIT_DRAIN_SECONDS = 10.0
"""How long a scheduler that shuts down waits for the commits under way."""

FINISHED_WELL = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class State(enum.Enum):
    ASKED = "asked"
    PENDING = "pending"
    SAVING = "saving"
    COMMITTING = "committing"


RUNNING_OR_BEFORE = (State.ASKED, State.PENDING)


@dataclass
class _Sample:
    """One attempt that has not ended yet."""

    request_id: str
    ref: SampleRef
    options: RequestOptions
    prompt_token_count: int
    look: Future[bool] | None  # whether its id is taken, while that is not known
    state: State
    doom: str | None = None  # why it will fail when its request is done
    token_count: int = 0
    digest: str = ""
    saved_at: float = 0.0  # when its request was done
    deadline: float = float("inf")
    fragments: dict[int, Fragment] = field(default_factory=dict)
    commit: Future[None] | None = None


class SchedulerSide:
    """Orders fragments, collects their reports, commits or fails the sample.

    Raises (constructor):
        Refused: the checkpoint has no fingerprint.
        StoreError: the store cannot be reached or written.
    """

    def __init__(self, vllm_config: VllmConfig, options: ConnectorOptions):
        end_with_parent()
        self._config = vllm_config
        self._options = options
        self._run_id = options.run_id or _new_run_id()
        self._fingerprint = checkpoint_fingerprint(vllm_config)
        self._store = open_store_committer(options.store)
        self._nonce = uuid.uuid4().hex
        self._store.leave_nonce(self._nonce)
        self._committer = StoreThread("stagetap-commit")
        self._owners: Mapping[int, WorkerFacts] = {}  # what the first rank of each one said
        self._tapped: Tapped | None = None
        self._breaker = Breaker(options.max_consecutive_failures, time.monotonic)
        self._samples: dict[str, _Sample] = {}  # by request id
        self._by_ref: dict[SampleRef, _Sample] = {}
        self._names: dict[str, str] = {}  # sample id -> request id, while it is under way
        self._awaited: set[str] = set()  # request ids whose final output waits for an outcome
        self._orders: list[SaveOrder] = []
        self._dropped: list[SampleRef] = []  # dead attempts that workers may still be publishing
        self._settled: list[Outcome] = []
        self._drain_deadline = float("inf")
        self._outbox = StatsOutbox()
        self._admission = Admission(
            run_id=self._run_id,
            store=self._store,
            address=options.store,
            breaker=self._breaker,
            outbox=self._outbox,
            under_way=self._names.__contains__,
            too_large=self._too_large,
        )

    # Start ---------------------------------------------------------------------------------

    def start(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Agree with all workers on what is captured, and open the run.

        Raises:
            Refused: see :func:`stagetap.engine.agreement.agree`; or the store holds another model.
            StoreError: the store cannot be written.
        """
        agreed = agree(self._config, self._options, self._fingerprint, self._nonce, metadata)
        self._store.begin_run(agreed.invariant)
        self._owners, self._tapped = agreed.owners, agreed.tapped
        logger.info(
            "stagetap: run %s, taps %s owned by %s, store %s",
            self._run_id,
            list(self._options.layers),
            {stage: list(taps.layer_ids) for stage, taps in enumerate(agreed.stages)},
            self._options.store,
        )

    # A request ------------------------------------------------------------------------------

    def admit(self, request: Request) -> Outcome | None:
        """Note a new request if it exports; an Outcome means that it must not run."""
        admitted = self._admission.ask(request)
        if not isinstance(admitted, Admitted):
            return admitted
        sample_id, options = admitted.sample_id, admitted.options
        sample = _Sample(
            request_id=request.request_id,
            ref=SampleRef(run_id=self._run_id, sample_id=sample_id, attempt=uuid.uuid4().hex[:16]),
            options=options,
            prompt_token_count=request.num_prompt_tokens,
            look=admitted.look,
            state=State.PENDING if admitted.look is None else State.ASKED,
            deadline=self._drain_deadline,
        )
        self._samples[request.request_id] = sample
        self._by_ref[sample.ref] = sample
        self._names[sample_id] = request.request_id
        if options.completion == "committed":
            self._awaited.add(request.request_id)
        return None

    def may_run(self, request_id: str) -> bool:
        """Whether a request does not wait for the store to say that its sample id is free."""
        sample = self._samples.get(request_id)
        return sample is None or sample.state is not State.ASKED

    def hear_looks(self) -> list[Outcome]:
        """Let requests run whose sample id is free; an Outcome means that one never must."""
        self._admission.look_after_hung_calls()
        now = time.monotonic()
        ended = []
        for sample in list(self._samples.values()):
            if sample.look is None:
                continue
            done = sample.look.done()  # what is done only after this is heard in the next step
            outcome = self._admission.hear(
                sample.request_id,
                sample.ref.sample_id,
                sample.look,
                time_is_over=now > sample.deadline,
            )
            if outcome is not None:
                self._awaited.discard(sample.request_id)
                self._forget(sample)
                ended.append(outcome)
            elif done:
                sample.look = None
                sample.state = State.PENDING
        return ended

    def asked(self) -> int:
        """How many requests wait for the store to say that their sample id is free."""
        return sum(sample.state is State.ASKED for sample in self._samples.values())

    def _too_large(self, token_count: int) -> str | None:
        """Why the store can never hold a sample of so many tokens, if it cannot."""
        workers = self._config.parallel_config.world_size
        room = capacity_bytes(self._options.store, workers)
        if room is None or self._tapped is None:
            return None
        size = sample_bytes(
            token_count,
            len(self._tapped.layer_ids),
            self._tapped.hidden_size,
            DTYPE_ITEMSIZE[self._tapped.dtype],
        )
        if size <= room:
            return None
        return (
            f"a sample of {token_count} tokens takes {size} bytes, the store's {workers} segments "
            f"hold {room}: shorten the prompt, or set a larger global_segment_size"
        )

    def is_prefill_only(self, request_id: str) -> bool:
        """Whether a request ends with its prompt and samples nothing."""
        sample = self._samples.get(request_id)
        return sample is not None and sample.options.prefill_only

    def doom_all(self, cause: str) -> None:
        """Something made every request that runs now worthless: none of them may commit."""
        logger.error("stagetap: %s", cause)
        for sample in self._samples.values():
            if sample.state in RUNNING_OR_BEFORE:
                sample.doom = sample.doom or cause
        self._breaker.hold("engine", cause)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's scheduler has finished a request and would free its pages now.

        Returns:
            Whether the pages must stay until every worker has released them, and what goes out
            with the final output.
        """
        sample = self._samples.get(request.request_id)
        if sample is None:
            return False, None
        if request.status not in FINISHED_WELL:
            # Aborted by its sender, or failed inside vLLM: nothing of it is ever committed.
            self._abort(sample)
            return False, None
        prompt, output = request.num_prompt_tokens, request.num_output_tokens
        rows = prompt + output - 1 if sample.options.include_output else prompt
        sample.saved_at = time.monotonic()
        try:
            order = self._order(sample, request, rows, block_ids)
        except StageTapError as error:
            self._fail(sample, str(error))
            return False, None
        sample.state = State.SAVING
        sample.token_count = rows
        sample.digest = token_digest(order.token_ids)
        sample.deadline = min(
            sample.saved_at + self._options.publish_timeout_s, self._drain_deadline
        )
        self._orders.append(order)
        return True, self.accepted_params(request.request_id)

    def accepted_params(self, request_id: str) -> dict[str, Any] | None:
        """What goes out with the final output of a request whose sample is being saved."""
        sample = self._samples.get(request_id)
        if sample is None:
            return None
        params = self._params(sample, "accepted")
        del params["bytes"]  # nothing is stored yet
        return {PARAMS_KEY: params}

    def _order(
        self, sample: _Sample, request: Request, rows: int, block_ids: tuple[list[int], ...]
    ) -> SaveOrder:
        if sample.doom is not None:
            raise StageTapError(f"sample {sample.ref.sample_id!r}: {sample.doom}")
        pages: dict[int, list[int]] = {}
        for stage, fact in self._owners.items():
            assert fact.cache_group is not None
            own = pages[fact.cache_group] = list(block_ids[fact.cache_group])
            if len(own) * fact.block_size < rows or request.num_computed_tokens < rows:
                raise StageTapError(
                    f"sample {sample.ref.sample_id!r}, stage {stage}: {rows} rows asked for, but "
                    f"{request.num_computed_tokens} tokens ran and {len(own)} pages of "
                    f"{fact.block_size} tokens are there"
                )
        return SaveOrder(
            request_id=request.request_id,
            ref=sample.ref,
            token_count=rows,
            token_ids=np.asarray(request.all_token_ids[:rows], dtype=np.int64),
            block_ids=pages,
            input_ids_stage=min(self._owners),
        )

    # Workers --------------------------------------------------------------------------------

    def take_orders(self) -> tuple[list[SaveOrder], list[SampleRef]]:
        """What the workers shall publish from the next step on, and what they shall give up."""
        orders, self._orders = self._orders, []
        dropped, self._dropped = self._dropped, []
        return orders, dropped

    def take_news(self, news: WorkerNews) -> None:
        """Fragments stored or failed, those of ended attempts ignored; stages that hang or not."""
        for stage, why in news.blocked.items():
            if why is None:
                self._breaker.release(f"stage {stage}")
            else:
                self._breaker.hold(f"stage {stage}", f"stage {stage} cannot publish: {why}")
                logger.error("stagetap: stage %d cannot publish: %s", stage, why)
        for report in news.reports:
            sample = self._by_ref.get(report.ref)
            if sample is None or sample.state is not State.SAVING:
                self._discard([report.fragment] if report.fragment is not None else [])
                continue
            if report.fragment is None:
                self._fail(
                    sample,
                    f"sample {report.ref.sample_id!r}, stage {report.stage}, store "
                    f"{self._options.store}: {report.error}",
                )
                continue
            sample.fragments[report.stage] = report.fragment
            if sample.fragments.keys() == self._owners.keys():
                self._commit(sample)

    def _commit(self, sample: _Sample) -> None:
        assert self._tapped is not None
        sample.state = State.COMMITTING
        manifest = Manifest(
            manifest_version=MANIFEST_VERSION,
            sample_id=sample.ref.sample_id,
            run_id=sample.ref.run_id,
            attempt=sample.ref.attempt,
            token_count=sample.token_count,
            prompt_token_count=sample.prompt_token_count,
            token_digest=sample.digest,
            fragments=tuple(sample.fragments[stage] for stage in sorted(sample.fragments)),
            tapped=self._tapped,
            created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
            metadata=sample.options.metadata,
        )
        # An fsync must not hold up the next step.
        sample.commit = self._committer.submit(self._store.commit, manifest)

    # Ends -----------------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[str]) -> None:
        """Their senders want no answer any more: what is not committed yet never will be.

        A commit that is being written at this moment is the exception: it cannot be taken back.
        """
        for request_id in request_ids:
            sample = self._samples.get(request_id)
            self._awaited.discard(request_id)
            if sample is None or (sample.commit is not None and not sample.commit.cancel()):
                continue
            if sample.state is not State.PENDING:
                self._abort(sample)

    def _abort(self, sample: _Sample) -> None:
        self._outbox.stats.count_sample("aborted")
        self._breaker.abandoned(sample.request_id)
        self._awaited.discard(sample.request_id)
        self._forget(sample)

    def begin_drain(self, seconds: float) -> None:
        """The engine stops: what has not ended in this time fails by name."""
        self._drain_deadline = time.monotonic() + seconds
        for sample in self._samples.values():
            sample.deadline = min(sample.deadline, self._drain_deadline)

    def withholds(self, request_id: str) -> bool:
        """Whether the final output of a request waits for its commit."""
        return request_id in self._awaited

    def busy(self) -> bool:
        """Whether the engine must keep stepping although no request runs."""
        return (
            bool(self._settled or self._dropped)
            or not self._outbox.stats.is_empty()  # metrics travel with a step
            or any(sample.state is not State.PENDING for sample in self._samples.values())
        )

    def take_settled(self) -> list[Outcome]:
        """Requests whose sample is committed or failed since the last call."""
        now = time.monotonic()
        self._admission.look_after_hung_calls()
        for sample in list(self._samples.values()):
            if sample.commit is not None and sample.commit.done():
                self._end_commit(sample, sample.commit)
            elif sample.state not in RUNNING_OR_BEFORE and now > sample.deadline:
                self._give_up(sample)
        settled, self._settled = self._settled, []
        self._awaited -= {outcome.request_id for outcome in settled}
        return settled

    def _end_commit(self, sample: _Sample, commit: Future[None]) -> None:
        error = commit.exception()
        if error is not None:
            self._fail(
                sample,
                f"sample {sample.ref.sample_id!r}, commit to store {self._options.store}: {error}",
            )
            return
        params = self._params(sample, "committed")
        self._outbox.stats.count_sample("committed", tokens=params["tokens"], bytes=params["bytes"])
        self._outbox.stats.record_commit(time.monotonic() - sample.saved_at)
        self._breaker.committed(sample.request_id)
        self._settled.append(Outcome(sample.request_id, params))
        self._forget(sample)

    def _give_up(self, sample: _Sample) -> None:
        """A sample whose time is over."""
        waited = f"within {sample.deadline - sample.saved_at:.3g} s"
        if sample.deadline == self._drain_deadline:
            waited += ", and the engine is shutting down"
        where = f"store {self._options.store}"
        name = sample.ref.sample_id
        if sample.commit is None:
            missing = sorted(self._owners.keys() - sample.fragments.keys())
            self._fail(
                sample, f"sample {name!r}: stages {missing} did not publish to {where} {waited}"
            )
        elif sample.commit.cancel():
            self._fail(sample, f"sample {name!r}: {where} did not take its commit {waited}")
        else:
            self._admission.hold_id(name, sample.commit)
            self._fail(
                sample,
                f"sample {name!r}: {where} did not answer to its commit {waited}; whether it was "
                "committed is known only when the store answers",
            )

    def _fail(self, sample: _Sample, cause: str) -> None:
        logger.error("stagetap: %s", cause)
        params = self._params(sample, "failed")
        params |= {"error": cause, "status": int(HTTPStatus.INTERNAL_SERVER_ERROR)}
        self._outbox.stats.count_sample("failed")
        self._breaker.failed(sample.request_id, cause)
        self._settled.append(Outcome(sample.request_id, params))
        self._forget(sample)
        self._committer.submit(self._record_error, sample.ref, cause)

    def _record_error(self, ref: SampleRef, cause: str) -> None:
        try:
            self._store.record_error(ref, None, cause)
        except StageTapError as error:
            # The sample has failed already, and its sender knows why.
            logger.warning("stagetap: the failure of %s could not be stored: %s", ref, error)

    def _forget(self, sample: _Sample) -> None:
        if sample.look is not None:
            sample.look.cancel()
        del self._samples[sample.request_id]
        del self._by_ref[sample.ref]
        del self._names[sample.ref.sample_id]
        if sample.state is State.SAVING:
            self._dropped.append(sample.ref)
        if sample.commit is None or sample.commit.cancelled():
            # No commit names them, and none ever will.
            self._discard(sample.fragments.values())

    def _discard(self, fragments: Iterable[Fragment]) -> None:
        """Let the store forget fragments of dead attempts, when it has time."""
        for fragment in fragments:
            self._committer.submit(self._forget_fragment, fragment)

    def _forget_fragment(self, fragment: Fragment) -> None:
        try:
            self._store.discard(fragment)
        except StageTapError as error:
            logger.warning("stagetap: %s of a dead attempt stays: %s", fragment.path, error)

    def _params(self, sample: _Sample, state: str) -> dict[str, Any]:
        return {
            "sample_id": sample.ref.sample_id,
            "run_id": sample.ref.run_id,
            "tokens": sample.token_count,
            "bytes": sum(fragment.byte_size for fragment in sample.fragments.values()),
            "state": state,
        }

    # Telling ---------------------------------------------------------------------------------

    def take_stats(self) -> StageTapStats | None:
        """What happened since the last call, for the metrics."""
        self._outbox.stats.set_breaker(self._breaker.state)
        self._outbox.stats.set_under_way(len(self._samples))
        return self._outbox.take()

    def tables(self) -> dict[str, int]:
        """How many entries each table of this side has; all are 0 when nothing is under way."""
        return {
            "samples": len(self._samples),
            "refs": len(self._by_ref),
            "names": len(self._names),
            "awaited": len(self._awaited),
            "orders": len(self._orders),
            "dropped": len(self._dropped),
            "settled": len(self._settled),
            "hung_commits": self._admission.held_ids,
        }

    def shutdown(self) -> None:
        """Finish the commits under way, name what is lost, and let go of the store."""
        for sample in self._samples.values():
            if sample.state is not State.COMMITTING:
                logger.error(
                    "stagetap: the engine ended before sample %r was committed (%s)",
                    sample.ref.sample_id,
                    sample.state.value,
                )
        if not self._committer.shutdown(COMMIT_DRAIN_SECONDS):
            logger.error("stagetap: a commit to %s did not return", self._options.store)
        self._store.close()


def _new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
