"""Taking what is offered in a Mooncake run, reading it, and removing what was consumed.

Who may take a sample is decided in the store, by the first put of a key, and not by the processes
that ask: they need know nothing of each other, and one of them may die at any moment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stagetap.errors import SampleFailed, SampleNotFound
from stagetap.reader.dataset import read_sample, sample_failed
from stagetap.reader.offers import Offer
from stagetap.reader.sample import Sample
from stagetap.stores.base import SampleRef
from stagetap.stores.mooncake_layout import ack_key, claim_key
from stagetap.stores.mooncake_objects import ABANDONED_SECONDS, create
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_records import Commit, Owner, decode_record, encode_record
from stagetap.stores.mooncake_removal import Doomed

_ROOM_SECONDS = 30.0
"""How long a claim waits for room in a full store: writers that get none give up what they hold."""

Sharing = Literal["claim", "broadcast"]
Removal = Literal["auto", "lease", "force", "keep"]
Failures = Literal["raise", "skip"]


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
    failures: Failures

    @property
    def force(self) -> bool:
        """Whether removal disregards leases."""
        return self.removal == "force" or (self.removal == "auto" and self.sharing == "claim")


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A sample that is ours, or why it failed, and what to do when it was consumed."""

    sample: Sample | SampleFailed
    finish: Callable[[], None]


class Consumer:
    """Takes what is offered, reads it, and removes what was consumed."""

    def __init__(self, reader: MooncakeStoreReader, how: Consumption, verify: bool | None) -> None:
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
        if self._reader.is_dying(offer.ref):
            # Consumed, by whoever it was for, and perhaps by one who died over its removal.
            commit = self._reader.find_commit(offer.ref.sample_id)
            ours = commit is not None and commit.manifest.attempt == offer.ref.attempt
            doomed = self._doomed(offer, commit if ours else None)
            self._reader.remove(doomed, force=self._how.force)
            return None
        if not self._is_ours(offer.ref):
            return None
        commit = self._reader.find_commit(offer.ref.sample_id)
        if offer.kind == "error":
            return self._failed(offer, commit)
        if commit is None or commit.manifest.attempt != offer.ref.attempt:
            # Removed, but for the page, by one who died over it.
            self._reader.remove(self._doomed(offer, None), force=True)
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
        record = encode_record(key, Owner(consumer=us))
        owner = create(objects, key, record, _ROOM_SECONDS, others_s=ABANDONED_SECONDS)
        return decode_record(key, owner, Owner).consumer == us

    def _failed(self, offer: Offer, commit: Commit | None) -> Taken | None:
        """An attempt that failed; None when that is to be skipped, or a later one was committed."""
        ref = offer.ref
        failure = self._reader.failure(ref.sample_id, ref.attempt, offer.stage)
        if commit is None and failure is not None:
            self.failed += 1
            if self._how.failures == "raise":
                error = sample_failed(failure)
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
