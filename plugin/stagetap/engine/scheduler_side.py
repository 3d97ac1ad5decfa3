"""The connector's half in the scheduler: one table of samples, and who may commit.

States of an attempt: PENDING (its request runs) -> SAVING (its stages publish) -> COMMITTING ->
COMMITTED, FAILED or ABORTED. This table is the only place that knows them.
"""

from __future__ import annotations

import enum
import time
import uuid
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from stagetap.engine.checkpoint import checkpoint_fingerprint
from stagetap.engine.messages import SaveOrder, WorkerFacts
from stagetap.engine.orphan import end_with_parent
from stagetap.engine.requests import stagetap_params
from stagetap.engine.series import check_series
from stagetap.errors import Refused, StageTapError
from stagetap.manifest import MANIFEST_VERSION, Fragment, Manifest, Tapped, token_digest
from stagetap.options import ConnectorOptions, RequestOptions, request_options
from stagetap.stores.base import Invariant, SampleRef, open_store_committer
from stagetap.taps import (
    ID_CONVENTION,
    NORM_STATE,
    STREAM_RESIDUAL,
    StageTaps,
    check_ownership,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.v1.request import Request

    from stagetap.publish.publisher import FragmentReport

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name

FINISHED_WELL = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class State(enum.Enum):
    PENDING = "pending"
    SAVING = "saving"
    COMMITTING = "committing"


@dataclass(frozen=True)
class Outcome:
    """How an exporting request ended.

    Attributes:
        request_id: vLLM's id.
        params: goes out as ``kv_transfer_params.stagetap`` of the final output.
    """

    request_id: str
    params: dict[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the request shall end with finish_reason ``error``."""
        return bool(self.params["state"] == "failed")


@dataclass
class _Sample:
    """One attempt that has not ended yet."""

    request_id: str
    ref: SampleRef
    options: RequestOptions
    prompt_token_count: int
    state: State = State.PENDING
    token_count: int = 0
    digest: str = ""
    deadline: float = float("inf")
    fragments: dict[int, Fragment] = field(default_factory=dict)
    commit: Future[None] | None = None
    manifest: Manifest | None = None


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
        self._committer = ThreadPoolExecutor(1, thread_name_prefix="stagetap-commit")
        self._owners: dict[int, WorkerFacts] = {}  # owning stage -> what its first rank said
        self._tapped: Tapped | None = None
        self._samples: dict[str, _Sample] = {}  # by request id
        self._by_ref: dict[SampleRef, _Sample] = {}
        self._names: dict[str, str] = {}  # sample id -> request id, while it is under way
        self._awaited: set[str] = set()  # request ids whose final output waits for an outcome
        self._orders: list[SaveOrder] = []
        self._settled: list[Outcome] = []

    # Start ---------------------------------------------------------------------------------

    def start(self, metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata]) -> None:
        """Compare what all workers said, derive who owns what, and open the run.

        Raises:
            Refused: workers differ, a tap has no owner or two, or the store holds another model.
            StoreError: a worker's mark is not in this store: not one shared directory.
        """
        facts: dict[tuple[int, int], WorkerFacts] = {}
        for rank, said in metadata.items():
            if not isinstance(said, WorkerFacts):
                raise Refused(f"worker {rank} is not StageTap's: it said {type(said).__name__}")
            facts[rank] = said
        self._check_equal(facts)
        model = self._config.model_config
        total = model.get_total_num_hidden_layers()
        stages = check_ownership(
            self._options.layers, total, {rank: fact.taps for rank, fact in facts.items()}
        )
        self._owners = {
            stage: fact
            for (stage, rank), fact in sorted(facts.items())
            if rank == 0 and fact.cache_group is not None
        }
        first = next(iter(facts.values()))
        self._tapped = self._describe(first, stages, total)
        self._store.begin_run(
            Invariant(
                weights_fingerprint=self._fingerprint,
                layer_ids=self._options.layers,
                stream=STREAM_RESIDUAL,
                dtype=first.dtype,
                id_convention=ID_CONVENTION,
                hidden_size=first.hidden_size,
                num_hidden_layers=total,
            )
        )
        logger.info(
            "stagetap: run %s, taps %s owned by %s, store %s",
            self._run_id,
            list(self._options.layers),
            {stage: list(taps.layer_ids) for stage, taps in enumerate(stages)},
            self._options.store,
        )

    def _check_equal(self, facts: Mapping[tuple[int, int], WorkerFacts]) -> None:
        expected = {
            "weights_fingerprint": self._fingerprint,
            "series_digest": check_series(),
            "dtype": next(iter(facts.values())).dtype,
            "hidden_size": next(iter(facts.values())).hidden_size,
        }
        for (stage, rank), fact in facts.items():
            for name, value in expected.items():
                if getattr(fact, name) != value:
                    raise Refused(
                        f"stage {stage}, tensor-parallel rank {rank} has {name} "
                        f"{getattr(fact, name)}, the scheduler {value}; every node needs the "
                        "same checkpoint and the same StageTap"
                    )
            if self._nonce not in fact.nonces:
                raise Refused(
                    f"stage {stage}, tensor-parallel rank {rank} does not see what the scheduler "
                    f"wrote to {self._options.store}; give a directory that all nodes share"
                )

    def _describe(self, fact: WorkerFacts, stages: tuple[StageTaps, ...], total: int) -> Tapped:
        parallel = self._config.parallel_config
        return Tapped(
            model=self._config.model_config.model,
            weights_fingerprint=self._fingerprint,
            weight_version="initial",
            adapter=None,
            stream=STREAM_RESIDUAL,
            norm_state=NORM_STATE,
            id_convention=ID_CONVENTION,
            layer_ids=self._options.layers,
            num_hidden_layers=total,
            hidden_size=fact.hidden_size,
            vllm_version=vllm.__version__,
            series_digest=fact.series_digest,
            pp_size=parallel.pipeline_parallel_size,
            tp_size=parallel.tensor_parallel_size,
            pp_layers=tuple((taps.start, taps.end) for taps in stages),
            kv_cache_dtype=self._config.cache_config.cache_dtype,
            dtype=fact.dtype,
        )

    # A request ------------------------------------------------------------------------------

    def admit(self, request: Request) -> Outcome | None:
        """Note a new request if it exports; an Outcome means that it must not run.

        The front end has checked its options; what only this process knows is checked here: a
        sample that is committed already, or under way.
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
        try:
            self._refuse_duplicate(sample_id)
        except Refused as error:
            return self._turned_away(request, sample_id, str(error), HTTPStatus.BAD_REQUEST)
        except StageTapError as error:
            cause = f"sample {sample_id!r}, store {self._options.store}: {error}"
            return self._turned_away(request, sample_id, cause, HTTPStatus.INTERNAL_SERVER_ERROR)
        sample = _Sample(
            request_id=request.request_id,
            ref=SampleRef(run_id=self._run_id, sample_id=sample_id, attempt=uuid.uuid4().hex[:16]),
            options=options,
            prompt_token_count=request.num_prompt_tokens,
        )
        self._samples[request.request_id] = sample
        self._by_ref[sample.ref] = sample
        self._names[sample_id] = request.request_id
        if options.completion == "committed":
            self._awaited.add(request.request_id)
        return None

    def _turned_away(
        self, request: Request, sample_id: str | None, cause: str, status: HTTPStatus
    ) -> Outcome:
        params = {
            "sample_id": sample_id,
            "run_id": self._run_id,
            "state": "failed",
            "error": cause,
            "status": int(status),
        }
        return Outcome(request.request_id, params)

    def _refuse_duplicate(self, sample_id: str) -> None:
        if sample_id in self._names:
            raise Refused(
                f"sample {sample_id!r} is under way in another request; one exporting request is "
                "one sample: give each prompt its own sample_id"
            )
        if self._store.is_committed(self._run_id, sample_id):
            raise Refused(
                f"sample {sample_id!r} is committed in run {self._run_id}; choose another sample_id"
            )

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
            self._forget(sample)
            self._awaited.discard(request.request_id)
            return False, None
        prompt, output = request.num_prompt_tokens, request.num_output_tokens
        rows = prompt + output - 1 if sample.options.include_output else prompt
        try:
            order = self._order(sample, request, rows, block_ids)
        except StageTapError as error:
            self._fail(sample, str(error))
            return False, None
        sample.state = State.SAVING
        sample.token_count = rows
        sample.digest = token_digest(order.token_ids)
        sample.deadline = time.monotonic() + self._options.publish_timeout_s
        self._orders.append(order)
        return True, {"stagetap": self._params(sample, "accepted")}

    def _order(
        self, sample: _Sample, request: Request, rows: int, block_ids: tuple[list[int], ...]
    ) -> SaveOrder:
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

    def take_orders(self) -> list[SaveOrder]:
        """What the workers shall publish from the next step on."""
        orders, self._orders = self._orders, []
        return orders

    def take_reports(self, reports: Iterable[FragmentReport]) -> None:
        """Fragments that workers stored or failed; those of ended attempts are ignored."""
        for report in reports:
            sample = self._by_ref.get(report.ref)
            if sample is None or sample.state is not State.SAVING:
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
        sample.manifest = Manifest(
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
        sample.commit = self._committer.submit(self._store.commit, sample.manifest)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Their senders want no answer any more: what is not committed yet never will be."""
        for request_id in request_ids:
            sample = self._samples.get(request_id)
            if sample is not None and sample.state is State.SAVING:
                self._forget(sample)
            self._awaited.discard(request_id)

    # Ends -----------------------------------------------------------------------------------

    def withholds(self, request_id: str) -> bool:
        """Whether the final output of a request waits for its commit."""
        return request_id in self._awaited

    def busy(self) -> bool:
        """Whether the engine must keep stepping for a sample whose request is done."""
        return bool(self._settled) or any(
            sample.state is not State.PENDING for sample in self._samples.values()
        )

    def take_settled(self) -> list[Outcome]:
        """Requests whose sample is committed or failed since the last call."""
        now = time.monotonic()
        for sample in list(self._samples.values()):
            if sample.commit is not None and sample.commit.done():
                self._end_commit(sample, sample.commit)
            elif sample.state is State.SAVING and now > sample.deadline:
                missing = sorted(self._owners.keys() - sample.fragments.keys())
                self._fail(
                    sample,
                    f"sample {sample.ref.sample_id!r}: stages {missing} did not publish to store "
                    f"{self._options.store} within {self._options.publish_timeout_s:g} s",
                )
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
        self._settled.append(Outcome(sample.request_id, self._params(sample, "committed")))
        self._forget(sample)

    def _fail(self, sample: _Sample, cause: str) -> None:
        logger.error("stagetap: %s", cause)
        params = self._params(sample, "failed")
        params |= {"error": cause, "status": int(HTTPStatus.INTERNAL_SERVER_ERROR)}
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
        del self._samples[sample.request_id]
        del self._by_ref[sample.ref]
        del self._names[sample.ref.sample_id]

    def _params(self, sample: _Sample, state: str) -> dict[str, Any]:
        return {
            "sample_id": sample.ref.sample_id,
            "run_id": sample.ref.run_id,
            "tokens": sample.token_count,
            "bytes": sum(fragment.byte_size for fragment in sample.fragments.values()),
            "state": state,
        }

    def shutdown(self) -> None:
        """Finish the commits under way and let go of the store."""
        for sample in self._samples.values():
            if sample.state is State.SAVING:
                logger.error("stagetap: sample %r is not committed", sample.ref.sample_id)
        self._committer.shutdown(wait=True)
        self._store.close()


def _new_run_id() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
