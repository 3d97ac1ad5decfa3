"""Samples as they are produced, each taken once: online training from a Mooncake run."""

import queue
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from torch.utils.data import IterableDataset, get_worker_info

from stagetap.errors import (
    Refused,
    SampleError,
    SampleFailed,
    SampleTimeout,
    StreamMismatch,
)
from stagetap.reader.checks import check_choices, check_numbers
from stagetap.reader.consumer import Consumer, Consumption, Failures, Removal, Sharing, Taken
from stagetap.reader.offers import IdSource, IndexSource, Offer, Source, is_of_the_store
from stagetap.reader.sample import Sample
from stagetap.stores.mooncake_reader import MooncakeStoreReader


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
        verify: bool | None,
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
        self._offer: Offer | None = None  # what the store failed over: to be tried again
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
        given = self._given
        if given is None:
            return False
        given.finish()
        self._given = None  # not before: what could not be said is said again
        return isinstance(given.sample, Sample)

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
                if self._offer is None:
                    self._offer = self._source.next(deadline, self._timeout_s, self._stopped)
                if self._offer is None:
                    break
                taken = self.consumer.take(self._offer)
                self._offer = None
            except Exception as error:  # noqa: BLE001 -- raised where the sample is asked for
                if not is_of_the_store(error):
                    self._offer = None
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
    verify: bool | None = None,
    removal: Removal = "auto",
    failures: Failures = "raise",
    timeout_s: float = 60.0,
    limit: int | None = None,
    prefetch: int = 2,
) -> OnlineStream:
    """The samples of a Mooncake run as they are committed, each consumed once.

    `sample_ids`: only these, in this order; a queue ends with None. Else all that the run's index
    tells of. `timeout_s` bounds the wait for each, `limit` their number, `prefetch` those that are
    read ahead. `stream` states the stream kind that is expected. `verify`: whether checksums are
    compared; by default they are, of samples that have any. See `Consumption` for the rest.

    Raises Refused, ForeignStore when the run has not begun, StreamMismatch, StoreError.
    """
    from stagetap.stores.mooncake_open import open_reader

    names = tuple(consumers)
    check_choices(
        sharing=(sharing, get_args(Sharing)),
        removal=(removal, get_args(Removal)),
        failures=(failures, get_args(Failures)),
    )
    check_numbers(timeout_s=(timeout_s, 0), limit=(limit, 1), prefetch=(prefetch, 1))
    if isinstance(sample_ids, str) or isinstance(consumers, str):
        raise Refused("sample_ids and consumers are lists of strings, not one: put it into a list")
    if not all((consumer is None or consumer, *names)):
        raise Refused(
            "a consumer needs a name that is not empty; without any it gets one of its own"
        )
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
        consumer=consumer or uuid.uuid4().hex[:16],
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
