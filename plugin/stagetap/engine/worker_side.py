"""The connector's half in a worker: pages of this stage's taps -> staging slots -> store."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank
from vllm.logger import init_logger

from stagetap.engine.budget import noted_budget
from stagetap.engine.capacity import capacity, without_layers
from stagetap.engine.capture import TapCache, installed_capture
from stagetap.engine.checkpoint import checkpoint_fingerprint
from stagetap.engine.messages import SaveOrder, StepOrders, WorkerFacts, WorkerNews
from stagetap.engine.metrics import FragmentOutcome, StageTapStats, StatsOutbox
from stagetap.engine.pages import Gather, TapPages, page_pieces, spanned_memory
from stagetap.engine.series import check_series
from stagetap.errors import Refused, StoreError
from stagetap.manifest import Layer
from stagetap.publish.pool import check_slot_bytes
from stagetap.publish.publisher import FragmentJob, FragmentReport, Publisher
from stagetap.stores.base import open_store_writer
from stagetap.taps import role_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from stagetap.options import ConnectorOptions
    from stagetap.publish.publisher import PoolStatus
    from stagetap.stores.base import SampleRef

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name

MIB = 1024 * 1024
HUNG_SECONDS = 1.0
"""How long dead attempts may hold all writers before a stage counts as hanging."""

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
        self._options = options
        self._kv_cache_config = kv_cache_config
        self._stage: int = get_pp_group().rank_in_group
        self._capture = installed_capture(vllm_config)
        self._cache = self._capture.cache
        group = _cache_group(kv_cache_config, self._cache)
        self._store = open_store_writer(options.store)
        self._facts = WorkerFacts(
            taps=self._capture.taps,
            dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
            hidden_size=vllm_config.model_config.get_hidden_size(),
            stream=self._capture.stream,
            cache_group=group,
            block_size=kv_cache_config.kv_cache_groups[group or 0].kv_cache_spec.block_size,
            weights_fingerprint=checkpoint_fingerprint(vllm_config),
            series_digest=check_series(),
            nonces=(),
            budget=noted_budget(vllm_config),
        )
        self._publisher: Publisher | None = None
        if self._cache is not None and get_tensor_model_parallel_rank() == 0:
            # Ranks of one tensor-parallel group hold equal taps: the first one writes.
            self._publisher = Publisher(
                self._store,
                slots=options.slots,
                slot_bytes=options.slot_bytes,
                writer_threads=options.writer_threads,
                pin_memory=torch.cuda.is_available(),
                refuse_nonfinite=options.on_nonfinite == "fail",
                checksum=options.checksum,
            )
            taps = len(self._capture.taps.layer_ids)
            check_slot_bytes(
                options.slot_bytes,
                taps * self._facts.hidden_size * vllm_config.model_config.dtype.itemsize,
            )
        self._pages: TapPages | None = None  # set by register_pages
        self._stores_from_pages = False
        self.samples_nothing = False  # whether no request of this step wants a token
        self._request_ids: dict[SampleRef, str] = {}
        self._released: set[str] = set()  # request ids whose pages are not read any more
        self._reports: list[FragmentReport] = []
        self._outbox = StatsOutbox()
        self._status: PoolStatus | None = None  # as last told
        self._blocked: dict[int, str | None] = {}
        self._full_since: float | None = None
        self._told_blocked = False

    def facts(self) -> WorkerFacts:
        """What the scheduler side compares over all workers; asked for once it exists.

        Raises:
            StoreError: the store cannot be read.
        """
        return replace(self._facts, nonces=tuple(self._store.read_nonces()))

    def register_pages(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take this stage's tap cache out of vLLM's caches, and log what it costs."""
        if self._cache is None:
            logger.info(
                "stagetap: stage %d (layers %d to %d) owns no tap",
                self._stage,
                self._capture.taps.start,
                self._capture.taps.end - 1,
            )
            return
        row = (len(self._capture.taps.layer_ids), self._facts.hidden_size)
        self._pages = TapPages.of([kv_caches[name] for name in self._cache.layer_names], row)
        if self._pages.block_size != self._facts.block_size:
            raise RuntimeError(
                f"stagetap: pages of the tap cache of stage {self._stage} hold "
                f"{self._pages.block_size} tokens, and blocks {self._facts.block_size}"
            )
        self._log_capacity(self._cache, self._pages)
        if self._publisher is not None:
            self._choose_source(self._pages)

    def _choose_source(self, pages: TapPages) -> None:
        """Whether rows are stored from their pages, or through slots; told to the log."""
        why_not = None
        rows = pages.whole_rows
        if self._options.direct_pages == "off":
            why_not = "direct_pages is off"
        elif not self._store.takes_pages:
            why_not = "this store waits for a disk"
        elif rows is None:
            why_not = f"rows lie in {len(pages.stripes)} stripes of columns"
        elif rows.device.type != "cpu":
            why_not = f"the pages are on {rows.device}"
        else:
            try:
                self._store.use_memory(spanned_memory(rows))
            except StoreError as error:
                why_not = str(error)
        self._stores_from_pages = why_not is None
        logger.info(
            "stagetap: stage %d stores %s",
            self._stage,
            "from its pages" if why_not is None else f"through slots: {why_not}",
        )

    def _log_capacity(self, cache: TapCache, pages: TapPages) -> None:
        config = self._kv_cache_config
        plain = without_layers(self._config, config, cache.layer_names)
        logger.info(
            "stagetap: stage %d captures taps %s: %.1f MiB for its tap cache; KV capacity of this "
            "stage %d tokens with capture, %d without",
            self._stage,
            list(self._capture.taps.layer_ids),
            pages.nbytes / MIB,
            capacity(self._config, config),
            capacity(self._config, plain),
        )

    def begin_step(self, orders: StepOrders) -> None:
        """Before a step."""
        self.samples_nothing = orders.samples_nothing

    def take_orders(self, orders: StepOrders) -> None:
        """Start to publish this stage's fragment of every sample, and give up dead attempts."""
        if self._publisher is None:
            self._released |= {order.request_id for order in orders.save}
            return
        for order in orders.save:
            self._request_ids[order.ref] = order.request_id
            try:
                self._publisher.submit(self._job(order))
            except Exception as error:
                # Whatever went wrong concerns this sample alone: the engine lives on.
                logger.exception("stagetap: stage %d could not start to publish", self._stage)
                self._released.add(self._request_ids.pop(order.ref))
                report = FragmentReport(
                    ref=order.ref,
                    stage=self._stage,
                    fragment=None,
                    error=f"{type(error).__name__}: {error}",
                    seconds=0.0,
                )
                self._reports.append(report)
                self._count(report)
        # Last: a sample may be ordered and given up within one step.
        for ref in orders.drop:
            self._publisher.cancel(ref)

    def _job(self, order: SaveOrder) -> FragmentJob:
        assert self._facts.cache_group is not None
        assert self._pages is not None
        block_ids = order.block_ids[self._facts.cache_group]
        taps = self._capture.taps.layer_ids
        total = self._config.model_config.get_total_num_hidden_layers()
        rows = self._pages.whole_rows if self._stores_from_pages else None
        return FragmentJob(
            ref=order.ref,
            stage=self._stage,
            layers=tuple(Layer(id=k, role=role_of(k, total)) for k in taps),
            dtype=self._pages.stripes[0].dtype,
            shape=(order.token_count, len(taps), self._facts.hidden_size),
            token_ids=order.token_ids if order.input_ids_stage == self._stage else None,
            gather=self._reader(self._pages, block_ids),
            pieces=None if rows is None else page_pieces(rows, block_ids),
        )

    def _reader(self, pages: TapPages, block_ids: list[int]) -> Gather:
        """Reads a request's rows; on a device, where no step waits for it, checks them as well."""
        read, cache = pages.reader(block_ids), self._cache
        if cache is None or not pages.stripes[0].is_cuda:
            return read

        def checked(start: int, end: int, out: torch.Tensor) -> None:
            read(start, end, out)
            cache.check()

        return checked

    def take_released(self) -> set[str]:
        """Request ids whose pages may be given to others, each once."""
        self._poll()
        released, self._released = self._released, set()
        return released

    def take_news(self) -> WorkerNews | None:
        """What the scheduler side must know and was not told yet."""
        reports, self._reports = self._reports, []
        blocked, self._blocked = self._blocked, {}
        return WorkerNews(reports, blocked) if reports or blocked else None

    def take_stats(self) -> StageTapStats | None:
        """What happened since the last call, for the metrics."""
        return self._outbox.take()

    def _poll(self) -> None:
        if self._publisher is None:
            return
        progress = self._publisher.poll()
        self._released |= {self._request_ids.pop(ref) for ref in progress.staged}
        self._reports += progress.reports
        for report in progress.reports:
            self._count(report)
        self._look_at(self._publisher.status())

    def _count(self, report: FragmentReport) -> None:
        outcome: FragmentOutcome = "stored"
        if report.fragment is None:
            outcome = "dropped" if report.cancelled else "failed"
        size = report.fragment.byte_size if report.fragment is not None else 0
        self._outbox.stats.record_fragment(self._stage, outcome, size, report.seconds)

    def _look_at(self, status: PoolStatus) -> None:
        """Note what changed in the pool, and whether anything can be published at all."""
        self._note_quarantine(status)
        if status == self._status:
            return
        self._status = status
        self._outbox.stats.set_stage(
            self._stage,
            slots=status.slots,
            slots_in_use=status.slots_in_use,
            slot_waiters=status.slot_waiters,
            slot_wait_seconds=status.slot_wait_seconds,
            quarantined_slots=status.quarantined_slots,
            hung_writes=status.hung_writes,
        )

    def _note_quarantine(self, status: PoolStatus) -> None:
        """Say that this stage hangs, and when it goes on."""
        if not status.quarantine_full:
            self._full_since = None
            if self._told_blocked:
                self._told_blocked = False
                self._blocked[self._stage] = None
            return
        now = time.monotonic()
        self._full_since = self._full_since or now
        # Many aborts at once look the same for the moment that a healthy store needs.
        if now - self._full_since >= HUNG_SECONDS and not self._told_blocked:
            self._told_blocked = True
            self._blocked[self._stage] = (
                f"{status.hung_writes} writes to {self._options.store} hang and hold "
                f"{status.quarantined_slots} of {status.slots} slots; it resumes by itself when "
                "one of them returns"
            )

    def tables(self) -> dict[str, int]:
        """How many entries each table of this side has; all are 0 when nothing is under way."""
        self._poll()
        found = {
            "request_ids": len(self._request_ids),
            "released": len(self._released),
            "reports": len(self._reports),
        }
        if self._publisher is not None:
            status = self._publisher.status()
            found |= {
                "jobs": self._publisher.busy(),
                "slots_in_use": status.slots_in_use,
                "slot_waiters": status.slot_waiters,
                "hung_writes": status.hung_writes,
            }
        return found

    def shutdown(self) -> None:
        """Give the fragments in flight a bounded time, and name those that did not make it."""
        if self._publisher is None:
            return
        for ref in self._publisher.shutdown(DRAIN_SECONDS):
            logger.error("stagetap: %s was still being written at shutdown; it is lost", ref)


def _cache_group(kv_cache_config: KVCacheConfig, cache: TapCache | None) -> int | None:
    """Index of the KV cache group that holds a tap cache; the same on the scheduler side.

    Raises:
        Refused: it lies in several, so that its stripes have no blocks in common.
    """
    if cache is None:
        return None
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if set(cache.layer_names) <= set(group.layer_names):
            return index
    raise Refused(
        f"vLLM keeps the {len(cache.layer_names)} stripes of this stage's tap cache in several "
        "groups, as it does when blocks hold pages of different sizes: set VLLM_KV_CACHE_LAYOUT to "
        "a layout that keeps layers apart, such as LBNHC"
    )
