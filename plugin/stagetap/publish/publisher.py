"""Worker threads that carry fragments from the tap cache through the slot pool to a store.

Nothing here raises into the engine's step: whatever goes wrong with a fragment becomes the `error`
of its report, and every job is reported exactly once.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from stagetap.errors import NonFinite, Refused, StageTapError
from stagetap.manifest import DTYPE_ITEMSIZE, Fragment, Layer
from stagetap.publish.checksum import Checksum, ChecksumName
from stagetap.publish.finite import first_nonfinite
from stagetap.publish.pool import Cancelled, Slot, SlotPool, check_slot_bytes
from stagetap.stores.base import FragmentHeader, FragmentWriter, SampleRef, StoreWriter

Gather = Callable[[int, int, torch.Tensor], None]
Pieces = Callable[[int, int], list[torch.Tensor]]

SMALLEST_PIECE_BYTES = 1 << 20
"""A fragment is stored from pages in pieces of this size on average, or else through slots: over
TCP Mooncake takes half a millisecond and more for each piece, in which a slot is filled."""

LARGEST_WRITE_BYTES = 64 << 20
"""What is stored from pages at once: enough that the time between two writes does not count."""

_BLOCK_BYTES = 2 << 20
"""What is looked at at once: it stays in a core's cache while it is read three times."""


@dataclass(frozen=True, kw_only=True)
class FragmentJob:
    """One fragment to publish. `shape` is (T, L_stage, H), `token_ids` int64 [T] or None.

    `gather(start, end, out)` copies rows [start, end) into `out` [end - start, L_stage, H], a
    contiguous host tensor of `dtype`, and returns when they can be read there. It is called from a
    writer thread, in row order.

    `pieces(start, end)` says where these rows are, as contiguous tensors [n, L_stage, H] in row
    order, in host memory that the store was told of. None when they are elsewhere, or not to be
    stored from there.
    """

    ref: SampleRef
    stage: int
    layers: tuple[Layer, ...]
    dtype: torch.dtype
    shape: tuple[int, int, int]
    token_ids: np.ndarray | None
    gather: Gather
    pieces: Pieces | None = None


@dataclass(frozen=True, kw_only=True)
class FragmentReport:
    """How a job ended: a stored `fragment`, or an `error`. `seconds` run from its submission.

    `cancelled`: its attempt was dead before it ended.
    """

    ref: SampleRef
    stage: int
    fragment: Fragment | None
    error: str | None
    seconds: float
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What happened since the last poll.

    `staged`: the pages are not read any more. `reports`: the job has ended.
    """

    staged: list[SampleRef] = field(default_factory=list)
    reports: list[FragmentReport] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class PoolStatus:
    """What publishing is held up by, at one moment.

    Attributes:
        slots: slots of the pool.
        slots_in_use: slots that somebody holds, the quarantined ones included.
        slot_waiters: jobs that wait for a slot.
        slot_wait_seconds: time that all jobs so far have waited for slots, those that wait now not
            included.
        quarantined_slots: slots that cancelled jobs hold until the store has let go of them.
        hung_writes: cancelled jobs that are inside the store, with or without a slot.
        quarantine_full: cancelled jobs hold all writer threads or all slots: until the store lets
            go of one, no fragment makes progress. True for a moment also when a healthy store is
            about to return from all of them.
    """

    slots: int
    slots_in_use: int
    slot_waiters: int
    slot_wait_seconds: float
    quarantined_slots: int
    hung_writes: int
    quarantine_full: bool


class Publisher:
    """`writer_threads` threads that serve jobs in the order of their submission.

    Rows are copied into a slot and written from there, or written from their pages where a job says
    how. A write that hangs keeps the memory that it may still read until it returns, also when the
    attempt is cancelled meanwhile: its slot is quarantined and its pages are free, or its pages
    are kept.
    """

    def __init__(
        self,
        store_writer: StoreWriter,
        slots: int,
        slot_bytes: int,
        writer_threads: int,
        pin_memory: bool = False,
        *,
        refuse_nonfinite: bool,
        checksum: ChecksumName = "xxh3_64",
    ) -> None:
        """Allocate the pool and start the threads. Raises Refused for sizes below 1.

        Raises StoreError when the store cannot work with the pool's memory.
        With `refuse_nonfinite` a job that gathers a NaN or Inf fails with NonFinite.
        """
        if writer_threads < 1:
            raise Refused(f"{writer_threads} writer threads: at least 1 is needed")
        self._store = store_writer
        self._refuse_nonfinite = refuse_nonfinite
        self._checksum = checksum
        self.pool = SlotPool(slots, slot_bytes, pin_memory)
        self._store.use_memory(memoryview(self.pool.memory.view(-1).numpy()))
        # Guards all that follows, and the state of every job. Nobody calls out while holding it.
        self._changed = threading.Condition()
        self._queued: deque[_Ticketed] = deque()
        self._running: list[_Ticketed] = []
        self._progress = Progress()
        self._next_ticket = 0
        self._stopping = False
        # Daemons: a write that never returns must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._serve, name=f"stagetap-writer-{n}", daemon=True)
            for n in range(writer_threads)
        ]
        self._lookers = ThreadPoolExecutor(writer_threads, thread_name_prefix="stagetap-looker")
        for thread in self._threads:
            thread.start()

    def submit(self, job: FragmentJob) -> None:
        """Queue a job; a job that cannot be done is reported as failed. Does not block.

        Raises StageTapError after `shutdown`.
        """
        with self._changed:
            if self._stopping:
                raise StageTapError("publishing has shut down: no fragment can be submitted")
            self._queued.append(
                _Ticketed(ticket=self._next_ticket, job=job, started=time.monotonic())
            )
            self._next_ticket += 1
            self._changed.notify()

    def cancel(self, ref: SampleRef) -> None:
        """End a dead attempt. A ref that is unknown or has ended is ignored. Does not block.

        What is queued ends at once, as failed. What is running gathers and writes no more: its
        pages are free at once, or when the call that reads them returns, and it ends when the store
        call that it is inside returns. Only a `finish` under way may still succeed.
        """
        with self._changed:
            for ticketed in [each for each in self._queued if each.job.ref == ref]:
                self._queued.remove(ticketed)
                ticketed.cancelled = True
                self._end(ticketed, None, _described(Cancelled("cancelled before it was begun")))
            for ticketed in self._running:
                if ticketed.job.ref == ref:
                    ticketed.cancelled = True
                    if not ticketed.reading:
                        self._announce_staged(ticketed)
        self.pool.wake()

    def status(self) -> PoolStatus:
        """Who holds what now. Does not block."""
        with self._changed:
            cancelled = [each for each in self._running if each.cancelled]
            quarantined = sum(each.holds_slot for each in cancelled)
            hung = sum(each.in_store for each in cancelled)
        return PoolStatus(
            slots=self.pool.slots,
            slots_in_use=self.pool.in_use,
            slot_waiters=self.pool.waiters,
            slot_wait_seconds=self.pool.waited_seconds,
            quarantined_slots=quarantined,
            hung_writes=hung,
            quarantine_full=hung >= len(self._threads) or quarantined >= self.pool.slots,
        )

    def poll(self) -> Progress:
        """The events since the last call, each exactly once. Does not block."""
        with self._changed:
            progress, self._progress = self._progress, Progress()
        return progress

    def busy(self) -> int:
        """Jobs that were submitted and have not ended."""
        with self._changed:
            return len(self._queued) + len(self._running)

    def shutdown(self, timeout_s: float) -> list[SampleRef]:
        """Finish what is queued within `timeout_s`; return the attempts that did not end in time.

        Those that still wait for a slot then fail, those inside a write are left to it. Their
        reports, if any, can still be polled.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.pool.close()
        self._lookers.shutdown(wait=False)
        with self._changed:
            return [ticketed.job.ref for ticketed in (*self._running, *self._queued)]

    def _serve(self) -> None:
        while (ticketed := self._next_job()) is not None:
            self._publish(ticketed)

    def _next_job(self) -> "_Ticketed | None":
        """The job that waits longest, as soon as there is one; None when no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued or self._stopping)
            if not self._queued:
                return None
            ticketed = self._queued.popleft()
            self._running.append(ticketed)
            return ticketed

    def _publish(self, ticketed: "_Ticketed") -> None:
        fragment, error = None, None
        try:
            fragment = self._store_fragment(ticketed)
        except BaseException as cause:  # noqa: BLE001 -- any cause must end up in the report
            error = _described(cause)
        with self._changed:
            self._running.remove(ticketed)
            self._end(ticketed, fragment, error)

    def _end(self, ticketed: "_Ticketed", fragment: Fragment | None, error: str | None) -> None:
        """Report a job that is neither queued nor running any more. The lock is held."""
        self._announce_staged(ticketed)
        self._progress.reports.append(
            FragmentReport(
                ref=ticketed.job.ref,
                stage=ticketed.job.stage,
                fragment=fragment,
                error=error,
                seconds=time.monotonic() - ticketed.started,
                cancelled=ticketed.cancelled,
            )
        )

    def _announce_staged(self, ticketed: "_Ticketed") -> None:
        """Say once that the pages are free. The lock is held, and nothing reads them."""
        if not ticketed.staged:
            ticketed.staged = True
            self._progress.staged.append(ticketed.job.ref)

    def _store_fragment(self, ticketed: "_Ticketed") -> Fragment:
        job = ticketed.job
        header = _header(job, self.pool.slot_bytes)
        with self._inside_store(ticketed):
            writer = self._store.open_fragment(header)
        try:
            checksum = self._stream(ticketed, header, writer)
            with self._inside_store(ticketed):
                stored = writer.finish()
        except BaseException as cause:
            with self._inside_store(ticketed, dead=True):
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
        """Write all rows, from their pages or through one slot at a time; return their checksum."""
        job, row_bytes = ticketed.job, _row_bytes(header)
        checksum = Checksum(self._checksum)
        if job.pieces is not None and _lies_in_large_pieces(job, job.pieces, row_bytes):
            for start, end in _chunks(job.shape[0], max(1, LARGEST_WRITE_BYTES // row_bytes)):
                with self._reading_pages(ticketed, last=end == job.shape[0]):
                    pieces = job.pieces(start, end)
                    self._write(ticketed, writer, checksum, start, pieces)
            return str(checksum)
        for start, end in _chunks(job.shape[0], self.pool.slot_bytes // row_bytes):
            with self._slot(ticketed) as slot:
                raw = slot.buffer[: (end - start) * row_bytes]
                rows = raw.view(job.dtype).view(end - start, *job.shape[1:])
                with self._reading_pages(ticketed, last=end == job.shape[0]):
                    job.gather(start, end, rows)
                self._write(ticketed, writer, checksum, start, [rows])
        return str(checksum)

    def _write(
        self,
        ticketed: "_Ticketed",
        writer: FragmentWriter,
        checksum: Checksum,
        start: int,
        pieces: list[torch.Tensor],
    ) -> None:
        """Write rows from `start` on, and look at them meanwhile: what is bad fails all the same.

        `pieces` [n, L_stage, H] are contiguous. On return nothing reads them any more.
        """
        looked = self._lookers.submit(self._look, ticketed.job, checksum, start, pieces)
        try:
            with self._inside_store(ticketed):
                writer.write([_bytes_of(piece) for piece in pieces])
        finally:
            wait([looked])
        looked.result()

    def _look(
        self, job: FragmentJob, checksum: Checksum, start: int, pieces: list[torch.Tensor]
    ) -> None:
        """Read rows from `start` on, a block at a time. Raises NonFinite."""
        rows_per_block = max(1, _BLOCK_BYTES // pieces[0][0].nbytes)
        for block in (each for piece in pieces for each in piece.split(rows_per_block)):
            if self._refuse_nonfinite:
                _check_finite(job, start, block)
            checksum.update(_bytes_of(block))
            start += len(block)

    @contextmanager
    def _slot(self, ticketed: "_Ticketed") -> Iterator[Slot]:
        """A slot for as long as the body runs. Raises Cancelled, PoolClosed."""
        slot = self.pool.acquire(ticketed.ticket, lambda: ticketed.cancelled)
        try:
            ticketed.holds_slot = True
            yield slot
        finally:
            ticketed.holds_slot = False
            self.pool.release(slot)

    @contextmanager
    def _reading_pages(self, ticketed: "_Ticketed", last: bool) -> Iterator[None]:
        """The body reads pages: they are not free meanwhile, and are free for good after the last.

        Raises Cancelled instead of running the body.
        """
        with self._changed:
            _check_alive(ticketed)
            ticketed.reading = True
        try:
            yield
        finally:
            with self._changed:
                ticketed.reading = False
                if last:
                    self._announce_staged(ticketed)

    @contextmanager
    def _inside_store(self, ticketed: "_Ticketed", dead: bool = False) -> Iterator[None]:
        """The body is one call of the store, which may hang.

        Raises Cancelled instead of running the body, unless the job is known to be `dead`: then
        the store only has to forget it, and its pages are free.
        """
        with self._changed:
            if dead:
                self._announce_staged(ticketed)
            else:
                _check_alive(ticketed)
            ticketed.in_store = True
        try:
            yield
        finally:
            with self._changed:
                ticketed.in_store = False


@dataclass(kw_only=True, eq=False)
class _Ticketed:
    """A job, and where it is. It holds at most one slot. `reading` pages excludes `staged`."""

    ticket: int
    job: FragmentJob
    started: float
    staged: bool = False
    cancelled: bool = False
    reading: bool = False
    holds_slot: bool = False
    in_store: bool = False


def _chunks(rows: int, rows_per_chunk: int) -> Iterator[tuple[int, int]]:
    """Rows [start, end), one chunk after the other."""
    for start in range(0, rows, rows_per_chunk):
        yield start, min(start + rows_per_chunk, rows)


def _lies_in_large_pieces(job: FragmentJob, pieces: Pieces, row_bytes: int) -> bool:
    rows = job.shape[0]
    return len(pieces(0, rows)) <= max(1, rows * row_bytes // SMALLEST_PIECE_BYTES)


def _check_alive(ticketed: _Ticketed) -> None:
    if ticketed.cancelled:
        raise Cancelled("cancelled while it was being written")


def _check_finite(job: FragmentJob, start: int, rows: torch.Tensor) -> None:
    """Raise NonFinite for the first NaN or Inf in the job's `rows` [n, L_stage, H] from `start`."""
    if (found := first_nonfinite(rows)) is not None:
        row, column, value = found
        raise NonFinite(
            f"layer {job.layers[column].id} is {'NaN' if math.isnan(value) else 'Inf'} at token "
            f"{start + row} of {job.shape[0]}; set the connector option on_nonfinite to "
            '"store" to keep such states'
        )


def _bytes_of(rows: torch.Tensor) -> memoryview:
    """The memory of contiguous rows."""
    return memoryview(rows.view(-1).view(torch.uint8).numpy())


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


def _described(cause: BaseException) -> str:
    return "; ".join([f"{type(cause).__name__}: {cause}", *getattr(cause, "__notes__", [])])
