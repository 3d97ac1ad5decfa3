"""vLLM's schedulers with three additions.

A request waits until its sample id is known to be free, its output until its sample is committed,
and one that only wants its states ends with its prompt.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import RequestStatus

from stagetap.engine.connector import stagetap_connector
from stagetap.options import PARAMS_KEY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from stagetap.engine.connector import StageTapConnector
    from stagetap.engine.outcome import Outcome
    from stagetap.engine.scheduler_side import SchedulerSide

IDLE_STEP_SECONDS = (0.001, 0.02)
"""Pauses after steps that ran nothing, the first and the longest one. Each doubles the last: an
engine that waits for a slow store leaves its cores to others.
"""


class CommitBarrier:
    """Mixed in before a vLLM scheduler class."""

    connector: Any
    requests: dict[str, Request]
    kv_cache_manager: KVCacheManager
    get_num_unfinished_requests: Callable[[], int]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._side: SchedulerSide = stagetap_connector(self.connector).scheduler_side
        # Final outputs that wait for their commit, by request id, with the client to send to.
        self._withheld: dict[str, tuple[int, EngineCoreOutput]] = {}
        self._refused: list[tuple[int, EngineCoreOutput]] = []
        self._pause = IDLE_STEP_SECONDS[0]

    def add_request(self, request: Request) -> None:
        refusal = self._side.admit(request)
        if refusal is None:
            super().add_request(request)  # type: ignore[misc]
            return
        self._refuse(request, refusal)

    def _refuse(self, request: Request, outcome: Outcome) -> None:
        output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[])
        self._refused.append((request.client_index, _ended(output, outcome)))

    def get_kv_connector(self) -> StageTapConnector:
        """Whom the engine core gives what the workers said at start: ours, also beside others.

        MultiConnector would hand these facts to all its connectors, and those that know nothing of
        pipeline stages would stop the engine over them.
        """
        return stagetap_connector(self.connector)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        for refusal in self._side.hear_looks():
            (request,) = super().finish_requests(  # type: ignore[misc]
                refusal.request_id, RequestStatus.FINISHED_ERROR
            )
            self._refuse(request, refusal)
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        for new in output.scheduled_new_reqs:
            stats = self.requests[new.req_id].prefill_stats
            if stats is not None and stats.num_external_cached_tokens:
                self._side.doom_all(
                    f"another connector brought {stats.num_external_cached_tokens} tokens of KV "
                    "cache into this engine; they ran no forward pass here and have no states, and "
                    "vLLM's prefix cache may hand them to any request; start the engine without "
                    "that connector"
                )
        return output

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if request_ids is None:
            ids = list(self._withheld)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        finished: list[Request] = super().finish_requests(  # type: ignore[misc]
            None if request_ids is None else ids, finished_status
        )
        self._side.abort(ids)
        for request_id in ids:
            self._withheld.pop(request_id, None)
        return finished

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        self._discard_samples(model_runner_output)
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(  # type: ignore[misc]
            scheduler_output, model_runner_output
        )
        for client, output in self._end_prefills(scheduler_output):
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        for client, client_outputs in outputs.items():
            sent = []
            for output in client_outputs.outputs:
                if output.finish_reason is not None and self._side.withholds(output.request_id):
                    self._withheld[output.request_id] = (client, output)
                else:
                    sent.append(output)
            client_outputs.outputs = sent
        ready, self._refused = self._refused, []
        for outcome in self._side.take_settled():
            withheld = self._withheld.pop(outcome.request_id, None)
            if withheld is not None:  # else its output went out when it was accepted
                client, output = withheld
                ready.append((client, _ended(output, outcome)))
        for client, output in ready:
            outputs.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        only_asked = self.get_num_unfinished_requests() <= self._side.asked()
        if ready or scheduler_output.total_num_scheduled_tokens or not only_asked:
            self._pause = IDLE_STEP_SECONDS[0]
        else:
            time.sleep(self._pause)
            self._pause = min(2 * self._pause, IDLE_STEP_SECONDS[1])
        return outputs

    def _discard_samples(self, model_runner_output: ModelRunnerOutput) -> None:
        """Drop the tokens that a mixed batch sampled for requests that want none."""
        sampled = model_runner_output.sampled_token_ids
        for index, request_id in enumerate(model_runner_output.req_ids if sampled else ()):
            if self._side.is_prefill_only(request_id):
                sampled[index] = []

    def _end_prefills(
        self, scheduler_output: SchedulerOutput
    ) -> Iterator[tuple[int, EngineCoreOutput]]:
        """Finish the prefill-only requests whose whole prompt has run."""
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            # Tokens in flight are scheduled, on some stage, and have not come back yet.
            done = request.num_computed_tokens - request.num_in_flight_tokens
            if done < request.num_prompt_tokens or not self._side.is_prefill_only(request_id):
                continue
            stats = request.take_prefill_stats()
            if stats is not None:
                stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
            super().finish_requests(  # type: ignore[misc]
                request_id, RequestStatus.FINISHED_LENGTH_CAPPED
            )
            accepted = self._side.accepted_params(request_id)
            yield (
                request.client_index,
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    prefill_stats=stats,
                    kv_transfer_params=accepted,
                    trace_headers=request.trace_headers,
                ),
            )

    def begin_drain(self, seconds: float) -> None:
        """The engine stops once all is done, in this time at most."""
        self._side.begin_drain(seconds)

    def has_requests(self) -> bool:
        return bool(self._refused) or super().has_requests()  # type: ignore[misc]


def _ended(output: EngineCoreOutput, outcome: Outcome) -> EngineCoreOutput:
    output.kv_transfer_params = {
        **(output.kv_transfer_params or {}),
        PARAMS_KEY: outcome.params,
    }
    if outcome.failed:
        output.finish_reason = FinishReason.ERROR
    return output


class TapScheduler(CommitBarrier, Scheduler):
    """Chosen by the configuration hook for synchronous scheduling."""


class TapAsyncScheduler(CommitBarrier, AsyncScheduler):
    """Chosen by the configuration hook for asynchronous scheduling."""
