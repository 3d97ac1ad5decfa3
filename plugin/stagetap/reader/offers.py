"""Which samples there are to take in a Mooncake run: what its index tells, or what is asked for."""

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from stagetap.errors import CorruptLog, Refused, SampleTimeout, StoreError
from stagetap.stores.base import Failure, SampleRef
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_records import Commit

_PAUSE_SECONDS = (0.002, 0.1)  # the first pause when there is nothing new, and the longest
_QUEUE_SECONDS = 0.1  # how long a wait for an id does not see that it is to stop


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An attempt that was committed, or that failed, on `stage` if on one."""

    ref: SampleRef
    kind: Literal["commit", "error"]
    stage: int | None
    pages: tuple[tuple[str, int], ...]
    asked: bool = False  # by its id: that it cannot be had is no matter of course


class Source(Protocol):
    """Where a stream learns which samples there are."""

    def next(self, deadline: float, timeout_s: float, stopped: threading.Event) -> Offer | None:
        """The next one; None when there will be no more. Gives up early once it is stopped.

        `deadline` is one of `time.monotonic`, `timeout_s` how long the caller said that it waits.
        Raises SampleTimeout, SampleFailed; StoreError, after which the next call goes on with the
        same sample.
        """


def is_of_the_store(error: Exception) -> bool:
    """Whether it was the store that failed, so that the same sample may be had at another try."""
    return isinstance(error, StoreError) and not isinstance(error, CorruptLog)


class IndexSource:
    """Whatever the engines of the run commit, as the index tells it."""

    def __init__(self, reader: MooncakeStoreReader) -> None:
        self._reader = reader
        self._offers: list[Offer] = []
        self._seen: set[tuple[SampleRef, str]] = set()

    def next(self, deadline: float, timeout_s: float, stopped: threading.Event) -> Offer | None:
        """See Source."""
        if not self._offers and not _ask_until(self._poll, deadline, stopped):
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
        self._ids = sample_ids if isinstance(sample_ids, queue.Queue) else iter(sample_ids)
        self._asked: str | None = None  # not answered yet, because the store failed

    def next(self, deadline: float, timeout_s: float, stopped: threading.Event) -> Offer | None:
        """See Source; raises SampleFailed when all that is known of the sample are failures."""
        if self._asked is None:
            self._asked = self._next_id(deadline, timeout_s, stopped)
        if self._asked is None:
            return None
        try:
            offer = self._offer(self._asked, deadline, timeout_s, stopped)
        except Exception as error:
            if not is_of_the_store(error):
                self._asked = None
            raise
        self._asked = None
        return offer

    def _next_id(self, deadline: float, timeout_s: float, stopped: threading.Event) -> str | None:
        if not isinstance(self._ids, queue.Queue):
            return _checked(next(self._ids, None))
        while not stopped.is_set():
            left = deadline - time.monotonic()
            try:
                return _checked(self._ids.get(timeout=min(_QUEUE_SECONDS, max(0.0, left))))
            except queue.Empty:
                if left <= 0:
                    raise SampleTimeout(
                        f"no sample id was put into the queue for {timeout_s:g} s: is who puts "
                        "them running? Wait longer, or put None at the end"
                    ) from None
        return None

    def _offer(
        self, sample_id: str, deadline: float, timeout_s: float, stopped: threading.Event
    ) -> Offer:
        found: Commit | None = None
        failures: list[Failure] = []

        def answered() -> bool:
            nonlocal found, failures
            found = self._reader.find_commit(sample_id)
            if found is None:
                self._reader.poll()
                failures = self._reader.failures(None, sample_id)
            return found is not None or bool(failures)

        if not _ask_until(answered, deadline, stopped):
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


def _checked(sample_id: object) -> str | None:
    """An id that the caller gave. Raises Refused."""
    if sample_id is not None and not isinstance(sample_id, str):
        raise Refused(f"sample id {sample_id!r}: ids are strings")
    return sample_id


def _ask_until(done: Callable[[], bool], deadline: float, stopped: threading.Event) -> bool:
    """As `mooncake_objects.wait_until`, with shorter pauses: a trainer waits for this."""
    pause, longest = _PAUSE_SECONDS
    while not done():
        left = deadline - time.monotonic()
        if left <= 0 or stopped.wait(min(pause, left)):
            return False
        pause = min(2 * pause, longest)
    return True


def _ref(reader: MooncakeStoreReader, sample_id: str, attempt: str) -> SampleRef:
    return SampleRef(run_id=reader.run_id, sample_id=sample_id, attempt=attempt)
