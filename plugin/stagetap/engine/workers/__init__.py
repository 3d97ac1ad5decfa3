"""vLLM's workers with capture installed right after the model is loaded, one file a platform."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from stagetap.engine.budget import note_budget
from stagetap.engine.capture import install_capture, installed_capture
from stagetap.engine.capture.stripes import lay_out
from stagetap.engine.configure import options_of
from stagetap.engine.connector import stagetap_connector
from stagetap.engine.invariant import end_worker
from stagetap.engine.refusal import announced
from stagetap.engine.series import check_series
from stagetap.errors import Refused

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.worker.gpu.model_runner import ExecuteModelState, GPUModelRunner

    from stagetap.engine.capture.self_check import Verdict


logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name


class StepWithoutSamples(AsyncModelRunnerOutput):
    """The scheduler hears of a step when it has run, as of any other."""

    def __init__(self, output: ModelRunnerOutput, stream: torch.cuda.Stream):
        self._output = output
        self._done = torch.cuda.Event(blocking=True)
        self._done.record(stream)

    def get_output(self) -> ModelRunnerOutput:
        self._done.synchronize()
        return self._output

    def get_kv_connector_output(self) -> KVConnectorOutput | None:
        """What 0.33.0 saves of a step whose output failed."""
        return self._output.kv_connector_output


class CapturesTaps:
    """Mixed in before a vLLM worker class."""

    vllm_config: Any
    model_runner: GPUModelRunner
    _laid_out = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model as vLLM does, then hook it and prove the hooks.

        Raises:
            Refused: the patch series or the loaded model is not what StageTap needs.
        """
        with announced():
            check_series()
            super().load_model(*args, **kwargs)  # type: ignore[misc]
            install_capture(
                self.model_runner.get_model(),
                self.vllm_config,
                options_of(self.vllm_config).layers,
                self._run_dummy_tokens,
            )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """As vLLM, with the tap cache laid out first; vLLM asks all workers at once."""
        if not self._laid_out:
            own = super().get_kv_cache_spec()  # type: ignore[misc]
            layouts = self.get_supported_kv_cache_layouts()  # type: ignore[attr-defined]
            lay_out(installed_capture(self.vllm_config).cache, self.vllm_config, own, layouts)
            self._laid_out = True
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()  # type: ignore[misc]
        return specs

    def _run_dummy_tokens(self, count: int) -> None:
        """A forward pass as vLLM's first profiling run makes it: no caches exist yet."""
        self.model_runner._dummy_run(count, skip_attn=True, is_profile=True)

    def determine_available_memory(self) -> int:
        """As vLLM; what was found is kept for the advice about partitions."""
        available: int = super().determine_available_memory()  # type: ignore[misc]
        runner = self.model_runner
        note_budget(self.vllm_config, runner.get_model(), runner.get_kv_cache_spec(), available)
        return available

    def execute_model(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """As vLLM, but a step that fails ends this worker where other stages would wait for it.

        Raises:
            Exception: the same, where this is the engine's only stage.
        """
        try:
            return self._execute_and_keep(scheduler_output)
        except Exception as error:
            if self.vllm_config.parallel_config.pipeline_parallel_size > 1:
                logger.exception("stagetap: a step of this stage failed")
                end_worker(error)
            raise

    def _execute_and_keep(
        self, scheduler_output: SchedulerOutput
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Run the step, and put its taps into their pages."""
        cache = installed_capture(self.vllm_config).cache
        with torch.inference_mode():
            if cache is not None:
                cache.begin_step()
            output: ModelRunnerOutput | AsyncModelRunnerOutput | None
            output = super().execute_model(scheduler_output)  # type: ignore[misc]
            if cache is not None and scheduler_output.total_num_scheduled_tokens:
                slots = self.model_runner.execute_model_state.slot_mappings_by_layer
                cache.end_step(slots[cache.layer_names[0]])
        return output

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """As vLLM, but a step whose requests only want their states computes no logits."""
        state = self.model_runner.execute_model_state
        if (
            state is None
            or not get_pp_group().is_last_rank
            or self.vllm_config.parallel_config.enable_eplb  # counts experts as it samples
            or not stagetap_connector(get_kv_transfer_group()).worker_side.samples_nothing
        ):
            output: ModelRunnerOutput | AsyncModelRunnerOutput | None
            output = super().sample_tokens(grammar_output)  # type: ignore[misc]
            return output
        with torch.inference_mode():
            return self._end_step_without_samples(state)

    def _end_step_without_samples(self, state: ExecuteModelState) -> StepWithoutSamples:
        """What the ranks before the last one do after a step, and the scheduler's empty answer.

        Those ranks wait for no token either: vLLM broadcasts none for a request whose only token
        would be its last, and a prefill-only request has ``max_tokens`` 1.
        """
        runner = self.model_runner
        runner.execute_model_state = None
        batch = state.input_batch
        runner.postprocess_num_computed_tokens(batch)
        runner.model_state.postprocess_state(batch.idx_mapping, 0)
        output = ModelRunnerOutput(
            req_ids=batch.req_ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(batch.req_ids)},
            sampled_token_ids=[[] for _ in batch.req_ids],
            cudagraph_stats=state.cudagraph_stats,
            kv_connector_output=runner.kv_connector.post_forward(state.finished_req_ids),
            ec_connector_output=state.ec_connector_output,
        )
        return StepWithoutSamples(output, runner.main_stream)

    def stagetap_verdicts(self) -> list[Verdict]:
        """What this worker's self-check has proven; for ``collective_rpc``."""
        return list(installed_capture(self.vllm_config).verdicts)

    def stagetap_tables(self) -> dict[str, int]:
        """Entries in this worker's tables; for ``collective_rpc``, to see that nothing leaks."""
        return stagetap_connector(get_kv_transfer_group()).worker_side.tables()

    def sleep(self, level: int = 1) -> None:
        """Refused: what sleeps forgets the pages of requests that are under way."""
        raise Refused("sleep mode is not in this version of StageTap; stop the engine instead")

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refused: manifests name the weights that were loaded at start."""
        raise _weights_are_fixed()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Refused, as :meth:`update_weights`."""
        raise _weights_are_fixed()

    def init_weight_transfer_engine(self, *args: Any, **kwargs: Any) -> None:
        """Refused, as :meth:`update_weights`."""
        raise _weights_are_fixed()


def _weights_are_fixed() -> Refused:
    return Refused(
        "weight updates are not in this version of StageTap: manifests name the weights that were "
        "loaded at start; start another engine with the new checkpoint"
    )
