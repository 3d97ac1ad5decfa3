"""Worker threads that carry fragments from the tap cache through the slot pool to a store.

Nothing here raises into the engine's step: whatever goes wrong with a fragment becomes the `error`
of its report, and every job is reported exactly once.
"""

import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash

from stagetap.errors import Refused, StageTapError
from stagetap.manifest import DTYPE_ITEMSIZE, Fragment, Layer
from stagetap.publish.pool import SlotPool, check_slot_bytes
from stagetap.stores.base import FragmentHeader, FragmentWriter, SampleRef, StoreWriter

Gather = Callable[[int, int, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class FragmentJob:
    """One fragment to publish. `shape` is (T, L_stage, H), `token_ids` int64 [T] or None.

    `gather(start, end, out)` copies rows [start, end) into `out` [end - start, L_stage, H], a
    contiguous host tensor of `dtype`, and returns when they can be read there. It is called from a
    writer thread, in row order.
    """

    ref: SampleRef
    stage: int
    layers: tuple[Layer, ...]
    dtype: torch.dtype
    shape: tuple[int, int, int]
    token_ids: np.ndarray | None
    gather: Gather


@dataclass(frozen=True, kw_only=True)
class FragmentReport:
    """How a job ended: a stored `fragment`, or an `error`. `seconds` run from its submission."""

    ref: SampleRef
    stage: int
    fragment: Fragment | None
    error: str | None
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What happened since the last poll.

    `staged`: no more `gather` call will be made, the pages are free. `reports`: the job has ended.
    """

    staged: list[SampleRef] = field(default_factory=list)
    reports: list[FragmentReport] = field(default_factory=list)


class Publisher:
    """`writer_threads` threads that serve jobs in the order of their submission.

    A write that hangs keeps its slot, and so the memory it may still read, until it returns.
    """

    def __init__(
        self,
        store_writer: StoreWriter,
        slots: int,
        slot_bytes: int,
        writer_threads: int,
        pin_memory: bool = False,
    ) -> None:
        """Allocate the pool and start the threads. Raises Refused for sizes below 1."""
        if writer_threads < 1:
            raise Refused(f"{writer_threads} writer threads: at least 1 is needed")
        self._store = store_writer
        self.pool = SlotPool(slots, slot_bytes, pin_memory)
        self._jobs: queue.SimpleQueue[_Ticketed | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._unfinished: dict[int, SampleRef] = {}
        self._progress = Progress()
        self._next_ticket = 0
        self._stopping = False
        # Daemons: a write that never returns must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._serve, name=f"stagetap-writer-{n}", daemon=True)
            for n in range(writer_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: FragmentJob) -> None:
        """Queue a job; a job that cannot be done is reported as failed. Does not block.

        Raises StageTapError after `shutdown`.
        """
        with self._lock:
            if self._stopping:
                raise StageTapError("publishing has shut down: no fragment can be submitted")
            ticketed = _Ticketed(ticket=self._next_ticket, job=job, started=time.monotonic())
            self._next_ticket += 1
            self._unfinished[ticketed.ticket] = job.ref
            self._jobs.put(ticketed)

    def poll(self) -> Progress:
        """The events since the last call, each exactly once. Does not block."""
        with self._lock:
            progress, self._progress = self._progress, Progress()
        return progress

    def busy(self) -> int:
        """Jobs that were submitted and have not ended."""
        with self._lock:
            return len(self._unfinished)

    def shutdown(self, timeout_s: float) -> list[SampleRef]:
        """Finish what is queued within `timeout_s`; return the attempts that did not end in time.

        Those that still wait for a slot then fail, those inside a write are left to it. Their
        reports, if any, can still be polled.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._stopping = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.pool.close()
        with self._lock:
            return list(self._unfinished.values())

    def _serve(self) -> None:
        while (ticketed := self._jobs.get()) is not None:
            self._publish(ticketed)

    def _publish(self, ticketed: "_Ticketed") -> None:
        job, fragment, error = ticketed.job, None, None
        try:
            fragment = self._store_fragment(ticketed)
        except BaseException as cause:  # noqa: BLE001 -- any cause must end up in the report
            error = "; ".join([f"{type(cause).__name__}: {cause}", *_notes(cause)])
        self._announce_staged(ticketed)
        report = FragmentReport(
            ref=job.ref,
            stage=job.stage,
            fragment=fragment,
            error=error,
            seconds=time.monotonic() - ticketed.started,
        )
        with self._lock:
            del self._unfinished[ticketed.ticket]
            self._progress.reports.append(report)

    def _announce_staged(self, ticketed: "_Ticketed") -> None:
        if not ticketed.staged:
            ticketed.staged = True
            with self._lock:
                self._progress.staged.append(ticketed.job.ref)

    def _store_fragment(self, ticketed: "_Ticketed") -> Fragment:
        job = ticketed.job
        header = _header(job, self.pool.slot_bytes)
        writer = self._store.open_fragment(header)
        try:
            checksum = self._stream(ticketed, header, writer)
            self._announce_staged(ticketed)
            stored = writer.finish()
        except BaseException as cause:
            _abort(writer, cause)
            raise
        return Fragment(
            stage=job.stage,
            layers=job.layers,
            path=stored.path,
            dtype=header.dtype,
            shape=job.shape,
            byte_size=_row_bytes(header) * job.shape[0],
            checksum=checksum,
            file_bytes=stored.file_bytes,
            parts=stored.parts,
            input_ids=job.token_ids is not None,
        )

    def _stream(self, ticketed: "_Ticketed", header: FragmentHeader, writer: FragmentWriter) -> str:
        """Carry all rows through one slot at a time; return their checksum."""
        job, row_bytes = ticketed.job, _row_bytes(header)
        rows_per_slot = self.pool.slot_bytes // row_bytes
        checksum = xxhash.xxh3_64()
        for start in range(0, job.shape[0], rows_per_slot):
            end = min(start + rows_per_slot, job.shape[0])
            slot = self.pool.acquire(ticketed.ticket)
            try:
                raw = slot.buffer[: (end - start) * row_bytes]
                job.gather(start, end, raw.view(job.dtype).view(end - start, *job.shape[1:]))
                rows = memoryview(raw.numpy())
                checksum.update(rows)
                writer.write(rows)
            finally:
                self.pool.release(slot)
        return f"xxh3_64:{checksum.hexdigest()}"


@dataclass(kw_only=True)
class _Ticketed:
    ticket: int
    job: FragmentJob
    started: float
    staged: bool = False


def _header(job: FragmentJob, slot_bytes: int) -> FragmentHeader:
    """What the store is told of the job. Raises Refused for a job that no store could hold."""
    dtype = str(job.dtype).removeprefix("torch.")
    tokens, columns, hidden = job.shape
    if dtype not in DTYPE_ITEMSIZE:
        raise Refused(f"dtype {dtype} cannot be stored, only {', '.join(DTYPE_ITEMSIZE)} can")
    if min(tokens, columns, hidden) < 1 or columns != len(job.layers):
        raise Refused(
            f"a fragment of shape {list(job.shape)} for {len(job.layers)} layers: every length "
            "must be at least 1, and axis 1 one column a layer"
        )
    if job.token_ids is not None and job.token_ids.shape != (tokens,):
        raise Refused(f"{job.token_ids.shape} token ids for {tokens} rows: give one a row")
    header = FragmentHeader(
        ref=job.ref,
        stage=job.stage,
        layers=job.layers,
        dtype=dtype,
        shape=job.shape,
        token_ids=job.token_ids,
    )
    check_slot_bytes(slot_bytes, _row_bytes(header))
    return header


def _row_bytes(header: FragmentHeader) -> int:
    return math.prod(header.shape[1:]) * DTYPE_ITEMSIZE[header.dtype]


def _abort(writer: FragmentWriter, cause: BaseException) -> None:
    """Remove the half-written fragment; a failure to do so is noted on what caused the abort."""
    try:
        writer.abort()
    except Exception as error:  # noqa: BLE001 -- the first cause is the one to report
        cause.add_note(f"its half-written fragment could not be removed: {error}")


def _notes(cause: BaseException) -> list[str]:
    return getattr(cause, "__notes__", [])
