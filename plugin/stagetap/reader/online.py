"""Samples as they are produced, each taken once: online training from a Mooncake run.

Who may take a sample is decided in the store, by the first put of a key, and not by the processes
that ask: they need know nothing of each other, and one of them may die at any moment.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch.utils.data import IterableDataset, get_worker_info

from stagetap.errors import (
    Refused,
    SampleError,
    SampleFailed,
    SampleNotFound,
    SampleTimeout,
    StreamMismatch,
)
from stagetap.reader.dataset import read_sample
from stagetap.reader.sample import Sample
from stagetap.stores.base import Failure, SampleRef
from stagetap.stores.mooncake_layout import ack_key, claim_key
from stagetap.stores.mooncake_objects import create
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_records import Commit, Owner, decode_record, encode_record
from stagetap.stores.mooncake_removal import Doomed

_PAUSE_SECONDS = (0.002, 0.1)  # the first pause when there is nothing new, and the longest

_ROOM_SECONDS = 30.0
"""How long a claim waits for room in a full store: writers that get none give up what they hold."""

Sharing = Literal["claim", "broadcast"]
Removal = Literal["auto", "lease", "force", "keep"]


@dataclass(frozen=True, kw_only=True)
class Consumption:
    """How a consumer takes part in a run.

    Attributes:
        consumer: its name. One that is started again under its old name gets again what it had
            taken and not finished.
        sharing: `claim`: each sample goes to one consumer; `broadcast`: to every one.
        consumers: with `broadcast`, the names of all: a sample is removed when all have read it.
        removal: of what was read: `force` at once, `lease` when nobody can be reading it any more,
            `keep` not at all. `auto` is `force` for a claimed sample, which nobody else may be
            reading, and `lease` for others.
        failures: whether a failed sample raises SampleFailed or is only counted.
    """

    consumer: str
    sharing: Sharing
    consumers: tuple[str, ...]
    removal: Removal
    failures: Literal["raise", "skip"]

    @property
    def force(self) -> bool:
        """Whether removal disregards leases."""
        return self.removal == "force" or (self.removal == "auto" and self.sharing == "claim")


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An attempt that was committed, or that failed, on `stage` if on one."""

    ref: SampleRef
    kind: Literal["commit", "error"]
    stage: int | None
    pages: tuple[tuple[str, int], ...]
    asked: bool = False  # by its id: that it cannot be had is no matter of course


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A sample that is ours, or why it failed, and what to do when it was consumed."""

    sample: Sample | SampleFailed
    finish: Callable[[], None]


class Source(Protocol):
    """Where a stream learns which samples there are."""

    def next(self, timeout_s: float, stopped: threading.Event) -> Offer | None:
        """The next one; None when there will be no more. Gives up early once it is stopped.

        Raises SampleTimeout, StoreError, SampleFailed.
        """


class IndexSource:
    """Whatever the engines of the run commit, as the index tells it."""

    def __init__(self, reader: MooncakeStoreReader) -> None:
        self._reader = reader
        self._offers: list[Offer] = []
        self._seen: set[tuple[SampleRef, str]] = set()

    def next(self, timeout_s: float, stopped: threading.Event) -> Offer | None:
        """See Source."""
        if not self._offers and not _ask_until(self._poll, timeout_s, stopped):
            raise SampleTimeout(
                f"nothing was committed to run {self._reader.run_id!r} for {timeout_s:g} s: is its "
                "engine running, and does another consumer take everything? Wait longer"
            )
        return self._offers.pop(0)

    def _poll(self) -> bool:
        for found in self._reader.poll_pages():
            page = found.page
            ref = _ref(self._reader, page.sample_id, page.attempt)
            if (ref, page.kind) in self._seen:
                continue  # told of twice, see MooncakeStoreCommitter.is_committed
            self._seen.add((ref, page.kind))
            self._offers.append(
                Offer(
                    ref=ref,
                    kind=page.kind,
                    stage=page.stage,
                    pages=((found.writer, found.seq),),
                )
            )
        return bool(self._offers)


class IdSource:
    """The samples whose ids the caller gives: from HTTP responses, a list, a queue."""

    def __init__(
        self, reader: MooncakeStoreReader, sample_ids: "Iterable[str] | queue.Queue[str | None]"
    ) -> None:
        self._reader = reader
        self._ids: Iterator[str | None]
        if isinstance(sample_ids, queue.Queue):
            self._ids = iter(sample_ids.get, None)
        else:
            self._ids = iter(sample_ids)

    def next(self, timeout_s: float, stopped: threading.Event) -> Offer | None:
        """See Source; raises SampleFailed when all that is known of the sample are failures."""
        sample_id = next(self._ids, None)
        if sample_id is None:
            return None
        found: Commit | None = None
        failures: list[Failure] = []

        def answered() -> bool:
            nonlocal found, failures
            found = self._reader.find_commit(sample_id)
            if found is None:
                self._reader.poll()
                failures = self._reader.failures(None, sample_id)
            return found is not None or bool(failures)

        if not _ask_until(answered, timeout_s, stopped):
            raise SampleTimeout(
                f"sample {sample_id!r} was not committed within {timeout_s:g} s: is its engine "
                "running, and is this its run? Wait longer or export it again",
                sample_id=sample_id,
            )
        if found is None:
            failure = failures[-1]
            return Offer(ref=failure.ref, kind="error", stage=failure.stage, pages=(), asked=True)
        return Offer(
            ref=_ref(self._reader, sample_id, found.manifest.attempt),
            kind="commit",
            stage=None,
            pages=((found.writer, found.seq),),
            asked=True,
        )


class Consumer:
    """Takes what is offered, reads it, and removes what was consumed."""

    def __init__(self, reader: MooncakeStoreReader, how: Consumption, verify: bool) -> None:
        self._reader = reader
        self._how = how
        self._verify = verify
        self.failed = 0

    def take(self, offer: Offer) -> Taken | None:
        """The sample, or its failure; None when it is somebody else's, or was consumed.

        Raises SampleNotFound for a sample that was asked for and is not to be had,
        and what reading a sample raises.
        """
        try:
            taken = self._take(offer)
        except SampleNotFound:
            taken = None  # deleted at this moment
        if taken is None and offer.asked and offer.kind == "commit":
            raise SampleNotFound(
                f"sample {offer.ref.sample_id!r} is taken by another consumer, or was consumed",
                sample_id=offer.ref.sample_id,
            )
        return taken

    def _take(self, offer: Offer) -> Taken | None:
        if not self._is_ours(offer.ref):
            return None
        commit = self._reader.find_commit(offer.ref.sample_id)
        if offer.kind == "error":
            return self._failed(offer, commit)
        if commit is None or commit.manifest.attempt != offer.ref.attempt:
            # Removed, but for the page, by one who died over it.
            self._reader.remove(self._doomed(offer, None), force=True)
            return None
        if self._reader.is_dying(offer.ref):
            # Consumed, by us before we were started again, or by all of us.
            self._reader.remove(self._doomed(offer, commit), force=self._how.force)
            return None
        sample = read_sample(self._reader, commit.manifest, self._verify)
        return Taken(sample=sample, finish=lambda: self._finish(offer, commit))

    def _is_ours(self, ref: SampleRef) -> bool:
        objects, us = self._reader.connection.objects, self._how.consumer
        if objects.exist([ack_key(ref, us)])[0]:
            return False  # consumed before we were started again
        if self._how.sharing == "broadcast":
            return True
        key = claim_key(ref)
        owner = create(objects, key, encode_record(key, Owner(consumer=us)), _ROOM_SECONDS)
        return decode_record(key, owner, Owner).consumer == us

    def _failed(self, offer: Offer, commit: Commit | None) -> Taken | None:
        """An attempt that failed; None when that is to be skipped, or a later one was committed."""
        ref = offer.ref
        failure = self._reader.failure(ref.sample_id, ref.attempt, offer.stage)
        if commit is None and failure is not None:
            self.failed += 1
            if self._how.failures == "raise":
                error = SampleFailed(
                    f"sample {ref.sample_id!r} failed on stage {offer.stage}: {failure.cause}: "
                    "export it again",
                    cause=failure.cause,
                    sample_id=ref.sample_id,
                    stage=offer.stage,
                )
                return Taken(sample=error, finish=lambda: self._finish(offer, None))
        self._finish(offer, None)
        return None

    def _finish(self, offer: Offer, commit: Commit | None) -> None:
        """The sample was consumed, or its failure noted. Raises StoreError."""
        if self._how.sharing == "broadcast" or self._how.removal == "keep":
            objects, ref = self._reader.connection.objects, offer.ref
            key = ack_key(ref, self._how.consumer)
            objects.put(key, encode_record(key, Owner(consumer=self._how.consumer)))
            acks = [ack_key(ref, name) for name in self._how.consumers]
            if self._how.removal == "keep" or not all(objects.exist(acks)):
                return
        self._reader.remove(self._doomed(offer, commit), force=self._how.force)

    def _doomed(self, offer: Offer, commit: Commit | None) -> Doomed:
        pages = set(offer.pages)
        if commit is not None:
            pages.add((commit.writer, commit.seq))
        return Doomed(
            ref=offer.ref,
            manifest=None if commit is None else commit.manifest,
            pages=tuple(sorted(pages)),
            consumers=self._how.consumers,
            error_stages=(offer.stage,) if offer.kind == "error" else (),
        )


class OnlineStream(IterableDataset[Sample]):
    """Samples of a run in the order of their commits, read ahead in a thread.

    A sample counts as consumed, and is removed, when the next one is asked for: a consumer that
    dies over a sample finds it again under its old name. `close`, or leaving a `with`, gives back
    nothing and consumes nothing; what was read ahead stays claimed under the consumer's name.

    An exception does not end the stream: the next `next` goes on behind the sample that it is of,
    or waits and tries again.
    """

    def __init__(
        self,
        reader: MooncakeStoreReader,
        how: Consumption,
        *,
        sample_ids: "Iterable[str] | queue.Queue[str | None] | None",
        verify: bool,
        timeout_s: float,
        limit: int | None,
        prefetch: int,
    ) -> None:
        """Use `consume`."""
        self._reader = reader
        self._how = how
        self._sample_ids = sample_ids
        self._verify = verify
        self._timeout_s = timeout_s
        self._limit = limit
        self._prefetch = prefetch
        self._running: _Pass | None = None
        self.consumed = 0

    def __iter__(self) -> Iterator[Sample]:
        """Start, or go on where the last iteration in this process stopped."""
        if self._running is None:
            how = self._how
            info = get_worker_info()
            if info is not None and info.num_workers > 1:
                if how.sharing == "broadcast" or self._sample_ids is not None:
                    raise Refused(
                        "DataLoader workers can share a run by claims alone: use one worker, or "
                        'sharing="claim" without sample_ids'
                    )
                how = Consumption(
                    consumer=f"{how.consumer}.{info.id}",
                    sharing=how.sharing,
                    consumers=(),
                    removal=how.removal,
                    failures=how.failures,
                )
            source: Source = IndexSource(self._reader)
            if self._sample_ids is not None:
                source = IdSource(self._reader, self._sample_ids)
            consumer = Consumer(self._reader, how, self._verify)
            self._running = _Pass(source, consumer, self._timeout_s, self._limit, self._prefetch)
        return self

    def __next__(self) -> Sample:
        """The next sample; the one before is consumed.

        Raises SampleTimeout when there is none for `timeout_s`, SampleFailed, what reading a
        sample raises, StoreError.
        """
        if self._running is None:
            raise Refused("iterate: iter(stream) starts it")
        self.finish()
        taken = self._running.next()
        if taken is None:
            raise StopIteration
        if isinstance(taken.sample, SampleFailed):
            raise taken.sample
        return taken.sample

    def finish(self) -> None:
        """Consume the sample that was given last, without asking for another. Raises StoreError."""
        if self._running is not None:
            self.consumed += self._running.finish()

    @property
    def failed(self) -> int:
        """Failed samples that were met."""
        return 0 if self._running is None else self._running.consumer.failed

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was consumed is removed from the store. Raises StoreError."""
        self._reader.settle(timeout_s)

    def close(self) -> None:
        """Stop reading ahead, and end the connection. Raises StoreError."""
        if self._running is not None:
            self._running.stop()
            self._running = None
        self._reader.close()

    def __enter__(self) -> "OnlineStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_running": None}


@dataclass(frozen=True)
class _Read:
    """What reading ahead came to: a sample, an exception, or the end."""

    taken: Taken | None = None
    error: Exception | None = None
    is_last: bool = False  # the thread has ended


class _Pass:
    """A thread that reads ahead, and what it has read."""

    def __init__(
        self,
        source: Source,
        consumer: Consumer,
        timeout_s: float,
        limit: int | None,
        prefetch: int,
    ) -> None:
        self._source = source
        self.consumer = consumer
        self._timeout_s = timeout_s
        self._limit = limit
        self._ready: queue.Queue[_Read] = queue.Queue(max(1, prefetch))
        self._stopped = threading.Event()
        self._given: Taken | None = None
        self._taken = 0
        self._ended = False
        self._thread: threading.Thread | None = None

    def next(self) -> Taken | None:
        """What was read next; None at the end. Raises what reading it raised."""
        if self._ended:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, name="stagetap-online", daemon=True)
            self._thread.start()
        found = self._ready.get()
        if found.is_last:
            self._thread.join()
            self._thread = None  # after an exception the next call goes on
        if found.error is not None:
            raise found.error
        self._given = found.taken
        self._ended = found.taken is None
        return found.taken

    def finish(self) -> bool:
        """Consume what was given last; whether it was a sample."""
        given, self._given = self._given, None
        if given is not None:
            given.finish()
        return given is not None and isinstance(given.sample, Sample)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        while self._thread is not None and self._thread.is_alive():
            try:
                self._ready.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def _read(self) -> None:
        read = _Read()
        while not read.is_last and not self._stopped.is_set():
            read = self._read_one()
            self._ready.put(read)

    def _read_one(self) -> _Read:
        if self._limit is not None and self._taken >= self._limit:
            return _Read(is_last=True)
        deadline = time.monotonic() + self._timeout_s
        while not self._stopped.is_set():
            try:
                offer = self._source.next(max(0.0, deadline - time.monotonic()), self._stopped)
                if offer is None:
                    break
                taken = self.consumer.take(offer)
            except Exception as error:  # noqa: BLE001 -- raised where the sample is asked for
                # What is wrong with one sample is not wrong with the next. After a timeout it is
                # for the caller to say whether to wait again.
                goes_on = isinstance(error, SampleError) and not isinstance(error, SampleTimeout)
                return _Read(error=error, is_last=not goes_on)
            if taken is not None:
                self._taken += isinstance(taken.sample, Sample)
                return _Read(taken=taken)
        return _Read(is_last=True)


def consume(
    uri: str,
    *,
    consumer: str | None = None,
    sharing: Sharing = "claim",
    consumers: Iterable[str] = (),
    sample_ids: "Iterable[str] | queue.Queue[str | None] | None" = None,
    stream: str | None = None,
    verify: bool = False,
    removal: Removal = "auto",
    failures: Literal["raise", "skip"] = "raise",
    timeout_s: float = 60.0,
    limit: int | None = None,
    prefetch: int = 2,
) -> OnlineStream:
    """The samples of a Mooncake run as they are committed, each consumed once.

    `sample_ids`: only these, in this order; a queue ends with None. Else all that the run's index
    tells of. `timeout_s` bounds the wait for each, `limit` their number, `prefetch` those that are
    read ahead. `stream` states the stream kind that is expected. See `Consumption` for the rest.

    Raises Refused, ForeignStore when the run has not begun, StreamMismatch, StoreError.
    """
    from stagetap.stores.mooncake_open import open_reader

    names = tuple(consumers)
    if sharing == "broadcast" and (consumer is None or consumer not in names):
        raise Refused(
            "sharing='broadcast' needs the names of all consumers, and its own among them: "
            "consumer='a', consumers=('a', 'b')"
        )
    if sharing == "claim" and names:
        raise Refused("consumers are named for sharing='broadcast' alone: drop them")
    reader = open_reader(uri)
    stored = reader.invariant.stream
    if stream is not None and stream != stored:
        raise StreamMismatch(
            f"{uri} holds the stream {stored!r}, asked for was {stream!r}: open another run"
        )
    how = Consumption(
        consumer=consumer or _some_name(),
        sharing=sharing,
        consumers=names,
        removal=removal,
        failures=failures,
    )
    return OnlineStream(
        reader,
        how,
        sample_ids=sample_ids,
        verify=verify,
        timeout_s=timeout_s,
        limit=limit,
        prefetch=prefetch,
    )


def _some_name() -> str:
    import uuid

    return uuid.uuid4().hex[:16]


def _ask_until(done: Callable[[], bool], timeout_s: float, stopped: threading.Event) -> bool:
    """As `mooncake_objects.wait_until`, with shorter pauses: a trainer waits for this."""
    deadline = time.monotonic() + timeout_s
    pause, longest = _PAUSE_SECONDS
    while not done():
        left = deadline - time.monotonic()
        if left <= 0 or stopped.wait(min(pause, left)):
            return False
        pause = min(2 * pause, longest)
    return True


def _ref(reader: MooncakeStoreReader, sample_id: str, attempt: str) -> SampleRef:
    return SampleRef(run_id=reader.run_id, sample_id=sample_id, attempt=attempt)
