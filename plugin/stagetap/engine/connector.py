"""vLLM's KV connector interface, thin: every call goes to the side that this process holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from stagetap.engine.configure import options_of
from stagetap.engine.messages import StepOrders, WorkerNews
from stagetap.engine.metrics import StageTapPromMetrics, StageTapStats
from stagetap.engine.refusal import announced
from stagetap.engine.scheduler_side import SchedulerSide
from stagetap.engine.series import check_series
from stagetap.engine.worker_side import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class StageTapConnector(KVConnectorBase_V1, SupportsHMA):
    """Publishes hidden states; loads nothing.

    Raises (constructor):
        StageTapError: see the side that is constructed; printed as one line, and vLLM stops, as
            `announced` says.
    """

    scheduler_side: SchedulerSide
    worker_side: WorkerSide

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        with announced(ends_core=role == KVConnectorRole.SCHEDULER):
            check_series()
            options = options_of(vllm_config)
            if role == KVConnectorRole.SCHEDULER:
                self.scheduler_side = SchedulerSide(vllm_config, options)
            else:
                self.worker_side = WorkerSide(vllm_config, kv_cache_config, options)

    # Worker side ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register_pages(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata:
        with announced():
            return self.worker_side.facts()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepOrders)
        self.worker_side.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Taps are in their pages already; a whole request is published at once."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepOrders)
        self.worker_side.take_orders(metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker_side.take_released() or None, None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.take_news()

    def get_kv_connector_stats(self) -> StageTapStats | None:
        if self.role == KVConnectorRole.SCHEDULER:
            return self.scheduler_side.take_stats()
        return self.worker_side.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StageTapStats:
        return StageTapStats.rebuild(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StageTapPromMetrics:
        return StageTapPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            self.scheduler_side.shutdown()
        else:
            self.worker_side.shutdown()

    # Scheduler side ------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        with announced(ends_core=True):
            self.scheduler_side.start(metadata)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        # None: vLLM asks again in the next step, and schedules the others meanwhile.
        return (0 if self.scheduler_side.may_run(request.request_id) else None), False

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """No external tokens, so nothing to note."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        save, drop = self.scheduler_side.take_orders()
        scheduled = scheduler_output.num_scheduled_tokens
        return StepOrders(
            save=save,
            drop=drop,
            samples_nothing=bool(scheduled)
            and all(map(self.scheduler_side.is_prefill_only, scheduled)),
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        news = connector_output.kv_connector_worker_meta
        if isinstance(news, WorkerNews):
            self.scheduler_side.take_news(news)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler_side.request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.busy()


def stagetap_connector(connector: Any) -> StageTapConnector:
    """The engine's StageTap connector, which may be one of several in vLLM's MultiConnector."""
    for one in getattr(connector, "sub_connectors", [connector]):
        if isinstance(one, StageTapConnector):
            return one
    raise TypeError(f"{type(connector).__name__} holds no StageTap connector")
