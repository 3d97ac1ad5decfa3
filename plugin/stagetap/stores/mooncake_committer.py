"""The scheduler's side of the Mooncake store.

The order of steps, and what a crash leaves behind after each:

1. the fragments (by the workers): objects that nothing names, and nobody sees;
2. the commit object: the sample can be read by its id. The engine has not been told, so nobody
   was. A retry is refused as a duplicate, and that very look appends the missing page;
3. the page of the index: readers of the run see the sample. Only now `commit` returns.

A failed sample is recorded in the same order: first the error object, then its page.
"""

import threading
import time
import uuid
from functools import partial

from stagetap.errors import (
    DuplicateSample,
    MalformedManifest,
    Refused,
    StageTapError,
    StoreError,
)
from stagetap.manifest import Fragment, Manifest
from stagetap.stores.base import Invariant, SampleRef
from stagetap.stores.kind import difference, kind_of
from stagetap.stores.mooncake_index import IndexWriter
from stagetap.stores.mooncake_layout import (
    error_record_key,
    input_ids_key,
    invariant_key,
    keys_of,
    page_key,
    payload_keys,
    sample_commit_key,
)
from stagetap.stores.mooncake_objects import (
    Objects,
    StoreFull,
    create,
    put_when_there_is_room,
    read,
)
from stagetap.stores.mooncake_records import (
    ErrorRecord,
    Page,
    WriterRecord,
    decode_commit,
    decode_run,
    encode_commit,
    encode_record,
    is_intact,
    unseal,
)


class MooncakeStoreCommitter:
    """Commits samples to one run, from any thread of one process."""

    def __init__(self, objects: Objects, run_id: str, room_timeout_s: float) -> None:
        """`room_timeout_s`: how long a commit waits for room in a full store."""
        self._objects = objects
        self._run_id = run_id
        self._room_timeout_s = room_timeout_s
        self._writing = threading.Lock()  # one thread at a time appends to the index
        self._index: IndexWriter | None = None
        self._invariant: Invariant | None = None

    def leave_nonce(self, nonce: str) -> None:
        """Introduce this writer to the run, with its nonce. Raises StoreError."""
        record = WriterRecord(writer=uuid.uuid4().hex[:16], nonce=nonce)
        index = IndexWriter(self._objects, self._run_id, record, self._room_timeout_s)
        index.introduce()
        self._index = index

    def begin_run(self, invariant: Invariant) -> None:
        """Claim the run for this kind of data. Raises Refused, UnknownVersion or StoreError."""
        key = invariant_key(self._run_id)
        stored = create(self._objects, key, encode_record(key, invariant), self._room_timeout_s)
        found = difference(decode_run(key, stored), invariant)
        if found is not None:
            field, ours, theirs = found
            raise Refused(
                f"run {self._run_id!r} holds data with {field} {ours}, this engine would write "
                f"{theirs}: give another run in the store's address"
            )
        self._invariant = invariant

    def is_committed(self, run_id: str, sample_id: str) -> bool:
        """Whether a commit exists, by whichever writer. Raises StoreError.

        One that its writer did not live to put into the index is put there now.
        """
        key = sample_commit_key(run_id, sample_id)
        if not self._objects.exist([key])[0]:
            return False
        data = read(self._objects, key)
        if data is None:
            return False  # deleted at this moment
        commit = decode_commit(key, data)
        index = self._index
        if index is None:
            return True
        page = page_key(run_id, commit.writer, commit.seq)
        if not self._objects.exist([page])[0]:
            # Its writer died between the two steps, or is between them now, or could not tell that
            # the first one was done, or the sample is just being deleted: readers take two pages of
            # one attempt for one, and one that names nothing for none.
            with self._writing:
                index.append(_page_of(commit.manifest, commit.committed_at_ns))
        return True

    def commit(self, manifest: Manifest) -> None:
        """Make the sample visible. See StoreCommitter, and the order of steps above."""
        self._check(manifest)
        key = sample_commit_key(manifest.run_id, manifest.sample_id)
        with self._writing:
            index = self._known_index()
            now_ns = time.time_ns()
            ours = encode_commit(key, now_ns, index.writer, index.next_seq, manifest)
            try:
                winner = create(self._objects, key, ours, self._room_timeout_s)
            except StoreFull:
                self._remove_fragments(manifest)
                raise
            except StoreError as error:
                self._take_back_ours(key, ours, manifest, error)
                raise
            if winner != ours:
                self._remove_fragments(manifest)
                unseal(key, winner)  # says so if it is damaged
                raise DuplicateSample(
                    f"sample {manifest.sample_id!r} of run {manifest.run_id!r} is committed "
                    "already: give it another id or leave it out"
                )
            try:
                index.append(_page_of(manifest, now_ns))
            except StoreError as error:
                self._take_back(key, manifest, error)
                raise

    def record_error(self, ref: SampleRef, stage: int | None, cause: str) -> None:
        """Leave the cause below the attempt, and a page that leads there. Raises StoreError."""
        now_ns = time.time_ns()
        record = ErrorRecord(attempt=ref.attempt, stage=stage, cause=cause, failed_at_ns=now_ns)
        key = error_record_key(ref, stage)
        put = partial(self._objects.put, key, encode_record(key, record))
        put_when_there_is_room(put, self._room_timeout_s, f"the failure of {ref.sample_id!r}")
        page = Page(
            kind="error", at_ns=now_ns, sample_id=ref.sample_id, attempt=ref.attempt, stage=stage
        )
        with self._writing:
            self._known_index().append(page)

    def discard(self, fragment: Fragment) -> None:
        """Remove a fragment that no commit will ever name. Raises StoreError."""
        keys = [*payload_keys(fragment), *[input_ids_key(fragment.path)] * fragment.input_ids]
        self._objects.remove(keys, force=True)

    def close(self) -> None:
        """End the connection. What was committed stays, as long as its segments do."""
        self._objects.close()

    def _check(self, manifest: Manifest) -> None:
        """Raise MalformedManifest or StoreError for what cannot be committed here."""
        if self._invariant is None:
            raise StageTapError("begin_run comes before commit")
        if manifest.run_id != self._run_id:
            raise MalformedManifest(
                f"manifest of sample {manifest.sample_id!r}: its run is {manifest.run_id!r}, the "
                f"store's {self._run_id!r}: restart the engine",
                sample_id=manifest.sample_id,
            )
        found = difference(self._invariant, kind_of(manifest.tapped))
        if found is not None:
            field, ours, theirs = found
            raise MalformedManifest(
                f"manifest of sample {manifest.sample_id!r}: {field} is {theirs}, the run was "
                f"begun with {ours}: restart the engine",
                sample_id=manifest.sample_id,
            )
        keys = keys_of(manifest)
        for key, exists in zip(keys, self._objects.exist(keys), strict=True):
            if not exists:
                raise StoreError(
                    f"{key} is not in the store any more: the process that held it has ended; "
                    "capture the sample again",
                    path=key,
                )

    def _known_index(self) -> IndexWriter:
        """The index to append to, of a run that readers can open and a writer that they find.

        A master that was restarted has forgotten everything. Then the run begins anew, and with
        another writer: a reader that has counted the pages of this one would wait for those that
        come after the ones that are gone. What is damaged is put anew, see `IndexWriter.is_known`.
        Raises Refused, StoreError.
        """
        if self._index is None:
            raise StageTapError("leave_nonce comes first")
        known = self._index.is_known()
        if not known:
            self.leave_nonce(self._index.nonce)
        if self._invariant is not None:
            key = invariant_key(self._run_id)
            stored = read(self._objects, key)
            if stored is not None and not is_intact(key, stored):
                self._objects.remove([key], force=True)
                stored = None
            if stored is None or not known:
                self.begin_run(self._invariant)
        return self._index

    def _remove_fragments(self, manifest: Manifest) -> None:
        """Nobody else will: the engine takes what it tries to commit for committed or given up."""
        self._objects.remove(keys_of(manifest), force=True)

    def _take_back_ours(self, key: str, ours: bytes, manifest: Manifest, error: StoreError) -> None:
        """After a put that may have happened: what is there may be another engine's."""
        try:
            if read(self._objects, key) not in (ours, None):
                self._remove_fragments(manifest)
                return
        except StoreError as second:
            error.add_note(f"and whether it was committed after all is not known: {second}")
            return  # If it was, the look of a retry puts it into the index.
        self._take_back(key, manifest, error)

    def _take_back(self, key: str, manifest: Manifest, error: StoreError) -> None:
        """Make a commit that is not in the index invisible again, so that a retry can succeed."""
        try:
            self._objects.remove([key], force=True)
            self._remove_fragments(manifest)
        except StoreError as second:
            error.add_note(f"and its commit could not be taken back: {second}")


def _page_of(manifest: Manifest, at_ns: int) -> Page:
    return Page(kind="commit", at_ns=at_ns, sample_id=manifest.sample_id, attempt=manifest.attempt)
