"""Which samples there are to take in a Mooncake run: what its index tells, or what is asked for."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from stagetap.errors import SampleTimeout
from stagetap.stores.base import Failure, SampleRef
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_records import Commit

_PAUSE_SECONDS = (0.002, 0.1)  # the first pause when there is nothing new, and the longest


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
