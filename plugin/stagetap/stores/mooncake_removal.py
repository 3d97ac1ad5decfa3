"""Taking samples out of a Mooncake store, while others may still hold leases on them.

The order of steps makes every half-done removal one that can be finished by whoever meets it, as
consumers and `stagetap verify --gc` do: a tombstone first, so that nobody takes the rest for a
broken sample; then the data; then the commit, which names the data; then claims and tombstone; at
last the page, which leads to all of it.
"""

import atexit
import logging
import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from stagetap.errors import StoreError
from stagetap.manifest import Manifest
from stagetap.stores.base import SampleRef
from stagetap.stores.mooncake_layout import (
    ack_key,
    claim_key,
    error_record_key,
    keys_of,
    page_key,
    sample_commit_key,
    tombstone_key,
)
from stagetap.stores.mooncake_objects import Objects, StoreFull
from stagetap.stores.mooncake_records import Owner, encode_record

_RETRY_SECONDS = 0.1

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Doomed:
    """What is to be removed: one attempt.

    `manifest` is None when there is no commit any more, or never was one; `pages` are (writer, seq)
    of what leads to the attempt; `error_stages` are those whose failure it recorded.
    """

    ref: SampleRef
    manifest: Manifest | None
    pages: tuple[tuple[str, int], ...] = ()
    consumers: tuple[str, ...] = ()
    error_stages: tuple[int | None, ...] = ()


class Step(NamedTuple):
    """Keys to remove at once. Leases are heeded on what somebody may be reading: not on small
    objects, which whoever looks at them reads whole or not at all."""

    keys: list[str]
    heeds_leases: bool


def steps(doomed: Doomed) -> list[Step]:
    """What to remove, one step after the other. Pure."""
    ref = doomed.ref
    data = [error_record_key(ref, stage) for stage in doomed.error_stages]
    commit = []
    if doomed.manifest is not None:
        data += keys_of(doomed.manifest)
        commit.append(sample_commit_key(ref.run_id, ref.sample_id))
    # Claims only now: whoever gets one from here on finds no commit.
    marks = [claim_key(ref), *[ack_key(ref, name) for name in doomed.consumers], tombstone_key(ref)]
    pages = [page_key(ref.run_id, writer, seq) for writer, seq in doomed.pages]
    return [Step(keys, keys is data) for keys in (data, commit, marks, pages) if keys]


class Remover:
    """Removes attempts: at once where nobody reads, behind the caller's back where somebody does.

    A read takes a lease, our own reads too, and Mooncake removes nothing that is leased. With
    `force` leases are ignored: for samples that nobody else can be reading.
    """

    def __init__(self, objects: Objects, lease_wait_s: float) -> None:
        self._objects = objects
        self._lease_wait_s = lease_wait_s
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._thread: threading.Thread | None = None
        self._failed: StoreError | None = None  # given up
        self._trouble: StoreError | None = None  # of the last try; it goes on
        self._pid = os.getpid()

    def remove(self, doomed: Doomed, *, force: bool) -> None:
        """Make the attempt unreadable, and remove it now or as soon as its leases end.

        Raises StoreError when it cannot be made unreadable, and once for an earlier removal that
        was given up: then nothing is done, and the caller may ask again. What the store fails over
        after that is tried again for as long as this process lives.
        """
        self._raise_failure()
        if doomed.manifest is not None:
            # In a full store go without it: what makes room must not wait for room.
            with suppress(StoreFull):
                key = tombstone_key(doomed.ref)
                self._objects.put(key, encode_record(key, Owner(consumer="")))
        waiting = _Waiting(steps(doomed), force, time.monotonic() + self._lease_wait_s)
        try:
            if self._advance(waiting):
                return
        except StoreError as error:
            self._trouble = error
        with self._changed:
            self._waiting.append(waiting)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, name="stagetap-remover", daemon=True
                )
                self._thread.start()
                atexit.register(self._settle_at_exit)
            self._changed.notify_all()

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was to be removed is. Raises StoreError when it is not in time."""
        with self._changed:
            done = self._changed.wait_for(lambda: not self._waiting, timeout_s)
            left = len(self._waiting)
        self._raise_failure()
        if not done and self._trouble is not None:
            raise StoreError(
                f"{left} samples that were deleted are not out of the store after {timeout_s:g} s: "
                f"{self._trouble}: what is left, `stagetap verify --gc` removes"
            ) from self._trouble
        if not done:
            raise StoreError(
                f"{left} samples are still being read {timeout_s:g} s after they were deleted: "
                "wait longer, or force their removal; what is left, `stagetap verify --gc` removes"
            )

    def close(self) -> None:
        """Wait until all is removed, as long as leases may last. Raises StoreError."""
        atexit.unregister(self._settle_at_exit)
        if os.getpid() == self._pid:  # a fork has no thread that removes
            self.settle(self._lease_wait_s)

    def _settle_at_exit(self) -> None:
        try:
            self.close()
        except StoreError as error:
            log.warning("%s", error)

    @property
    def pending(self) -> int:
        """Attempts that wait for the end of a lease."""
        return len(self._waiting)

    def _advance(self, waiting: "_Waiting") -> bool:
        """Remove what can be removed; whether that was all. Raises StoreError."""
        while waiting.steps:
            keys, heeds_leases = waiting.steps[0]
            leased = self._objects.remove(keys, force=waiting.force or not heeds_leases)
            if leased:
                waiting.steps[0] = Step(list(leased), heeds_leases)
                return False
            del waiting.steps[0]
        return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                tries = list(self._waiting)
            for waiting in tries:
                failure: StoreError | None = None
                try:
                    done, self._trouble = self._advance(waiting), None
                except StoreError as error:
                    done, self._trouble = False, error
                is_over = time.monotonic() > waiting.deadline
                if not done and is_over and self._trouble is None:
                    done = True
                    failure = StoreError(
                        f"{waiting.steps[0].keys[0]} is read again and again, so it could not be "
                        f"removed within {self._lease_wait_s:g} s: set lease_wait or force_remove; "
                        "what is left, `stagetap verify --gc` removes"
                    )
                with self._changed:
                    if failure is not None:
                        self._failed = failure
                    if done:
                        self._waiting.remove(waiting)
                        self._changed.notify_all()
            time.sleep(_RETRY_SECONDS)

    def _raise_failure(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed


@dataclass(eq=False)
class _Waiting:
    steps: list[Step]
    force: bool
    deadline: float
