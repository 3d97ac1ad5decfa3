"""The connector's half in a worker: pages of this stage's taps -> staging slots -> store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.logger import init_logger

from stagetap.engine.capture import TapCacheLayer, installed_capture
from stagetap.engine.checkpoint import checkpoint_fingerprint
from stagetap.engine.messages import FragmentReports, SaveOrder, SaveOrders, WorkerFacts
from stagetap.engine.pages import page_reader
from stagetap.engine.series import check_series
from stagetap.manifest import Layer
from stagetap.publish.pool import check_slot_bytes
from stagetap.publish.publisher import FragmentJob, FragmentReport, Publisher
from stagetap.stores.base import open_store_writer
from stagetap.taps import role_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from stagetap.options import ConnectorOptions
    from stagetap.stores.base import SampleRef

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name

MIB = 1024 * 1024
DRAIN_SECONDS = 10.0
"""How long a worker that shuts down waits for the fragments that it is writing."""


class WorkerSide:
    """Publishes what this worker owns; a worker that writes nothing only reports in.

    Raises (constructor):
        Refused: the patch series, the capture or the checkpoint is not what it must be.
        StoreError: the store cannot be reached or written.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, options: ConnectorOptions
    ):
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._stage: int = get_pp_group().rank_in_group
        self._capture = installed_capture(vllm_config)
        self._layer = self._capture.layer
        group = _cache_group(kv_cache_config, self._layer)
        self._store = open_store_writer(options.store)
        self._facts = WorkerFacts(
            taps=self._capture.taps,
            dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            hidden_size=vllm_config.model_config.get_hidden_size(),
            cache_group=group,
            block_size=kv_cache_config.kv_cache_groups[group or 0].kv_cache_spec.block_size,
            weights_fingerprint=checkpoint_fingerprint(vllm_config),
            series_digest=check_series(),
            nonces=(),
        )
        self._publisher: Publisher | None = None
        if self._layer is not None and get_tensor_model_parallel_rank() == 0:
            # Ranks of one tensor-parallel group hold equal taps: the first one writes.
            self._publisher = Publisher(
                self._store,
                slots=options.slots,
                slot_bytes=options.slot_bytes,
                writer_threads=options.writer_threads,
                pin_memory=torch.cuda.is_available(),
            )
            taps = len(self._capture.taps.layer_ids)
            check_slot_bytes(
                options.slot_bytes,
                taps * self._facts.hidden_size * vllm_config.model_config.dtype.itemsize,
            )
        self._pages = torch.empty(0)  # [num_blocks, L, block_size, H], set by register_pages
        self._step_has_tokens = False
        self._request_ids: dict[SampleRef, str] = {}
        self._released: set[str] = set()  # request ids whose pages are not read any more
        self._reports: list[FragmentReport] = []

    def facts(self) -> WorkerFacts:
        """What the scheduler side compares over all workers; asked for once it exists.

        Raises:
            StoreError: the store cannot be read.
        """
        return replace(self._facts, nonces=tuple(self._store.read_nonces()))

    def register_pages(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take this stage's tap cache out of vLLM's caches, and log what it costs."""
        if self._layer is None:
            logger.info(
                "stagetap: stage %d (layers %d to %d) owns no tap",
                self._stage,
                self._capture.taps.start,
                self._capture.taps.end - 1,
            )
            return
        self._pages = kv_caches[self._layer.layer_name]
        taps = len(self._capture.taps.layer_ids)
        expected = (taps, self._facts.block_size, self._facts.hidden_size)
        if self._pages.shape[1:] != expected:
            raise RuntimeError(
                f"stagetap: the tap cache of stage {self._stage} has pages of shape "
                f"{tuple(self._pages.shape[1:])}, not {expected}"
            )
        self._log_capacity()

    def _log_capacity(self) -> None:
        num_blocks, _, block_size, _ = self._pages.shape
        tap_bytes = self._pages.numel() * self._pages.element_size()
        # Every tensor says the size of the one allocation that it lies in.
        all_bytes = max(tensor.size for tensor in self._kv_cache_config.kv_cache_tensors)
        with_taps = num_blocks * block_size
        without = with_taps * all_bytes // max(all_bytes - tap_bytes, 1)
        logger.info(
            "stagetap: stage %d captures taps %s: %.1f MiB of its %.1f MiB cache; KV capacity "
            "%d tokens with capture, %d without",
            self._stage,
            list(self._capture.taps.layer_ids),
            tap_bytes / MIB,
            all_bytes / MIB,
            with_taps,
            without,
        )

    def begin_step(self) -> None:
        """Before a step, inside vLLM's forward context when the step has tokens."""
        self._step_has_tokens = (
            is_forward_context_available() and get_forward_context().attn_metadata is not None
        )
        if self._layer is not None:
            self._layer.begin_step()

    def finish_forward(self) -> None:
        """After the model ran.

        Raises:
            RuntimeError: a tap was not captured; the engine must not go on.
        """
        if self._step_has_tokens and self._layer is not None:
            self._layer.check_step()
        self._step_has_tokens = False

    def take_orders(self, metadata: SaveOrders) -> None:
        """Start to publish this stage's fragment of every ordered sample."""
        for order in metadata.orders:
            if self._publisher is None:
                self._released.add(order.request_id)
                continue
            self._request_ids[order.ref] = order.request_id
            try:
                self._publisher.submit(self._job(order))
            except Exception as error:
                # Whatever went wrong concerns this sample alone: the engine lives on.
                logger.exception("stagetap: stage %d could not start to publish", self._stage)
                self._released.add(self._request_ids.pop(order.ref))
                self._reports.append(
                    FragmentReport(
                        ref=order.ref,
                        stage=self._stage,
                        fragment=None,
                        error=f"{type(error).__name__}: {error}",
                        seconds=0.0,
                    )
                )

    def _job(self, order: SaveOrder) -> FragmentJob:
        assert self._facts.cache_group is not None
        taps = self._capture.taps.layer_ids
        total = self._config.model_config.get_total_num_hidden_layers()
        return FragmentJob(
            ref=order.ref,
            stage=self._stage,
            layers=tuple(Layer(id=k, role=role_of(k, total)) for k in taps),
            dtype=self._pages.dtype,
            shape=(order.token_count, len(taps), self._facts.hidden_size),
            token_ids=order.token_ids if order.input_ids_stage == self._stage else None,
            gather=page_reader(self._pages, order.block_ids[self._facts.cache_group]),
        )

    def take_released(self) -> set[str]:
        """Request ids whose pages may be given to others, each once."""
        self._poll()
        released, self._released = self._released, set()
        return released

    def take_reports(self) -> FragmentReports | None:
        """Fragments stored or failed since the last call."""
        reports, self._reports = self._reports, []
        return FragmentReports(reports) if reports else None

    def _poll(self) -> None:
        if self._publisher is None:
            return
        progress = self._publisher.poll()
        self._released |= {self._request_ids.pop(ref) for ref in progress.staged}
        self._reports += progress.reports

    def shutdown(self) -> None:
        """Give the fragments in flight a bounded time, and name those that did not make it."""
        if self._publisher is None:
            return
        for ref in self._publisher.shutdown(DRAIN_SECONDS):
            logger.error("stagetap: %s was still being written at shutdown; it is lost", ref)


def _cache_group(kv_cache_config: KVCacheConfig, layer: TapCacheLayer | None) -> int | None:
    """Index of the KV cache group that holds a layer; the same on the scheduler side."""
    if layer is None:
        return None
    (group,) = (
        index
        for index, spec in enumerate(kv_cache_config.kv_cache_groups)
        if layer.layer_name in spec.layer_names
    )
    return group
