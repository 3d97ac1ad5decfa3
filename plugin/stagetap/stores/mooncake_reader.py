"""The trainer's side of the Mooncake store: pages, commits, and fragments in host memory."""

import os
from collections.abc import Callable, Sequence
from typing import Any

from stagetap.errors import (
    ForeignFile,
    ForeignStore,
    MissingFragment,
    SampleNotFound,
    TruncatedFragment,
)
from stagetap.manifest import Fragment, Manifest
from stagetap.stores.base import (
    CommitEntry,
    DeleteEntry,
    Failure,
    FragmentBytes,
    Invariant,
    SampleRef,
)
from stagetap.stores.checks import fragment_error
from stagetap.stores.mooncake_buffers import BufferPool
from stagetap.stores.mooncake_index import FoundPage, IndexReader
from stagetap.stores.mooncake_layout import (
    error_record_key,
    input_ids_key,
    invariant_key,
    log_name,
    misplaced,
    part_sizes,
    payload_keys,
    ref_of,
    sample_commit_key,
    tombstone_key,
    writer_of,
)
from stagetap.stores.mooncake_objects import Objects, read
from stagetap.stores.mooncake_records import (
    Commit,
    ErrorRecord,
    decode_commit,
    decode_record,
    decode_run,
)
from stagetap.stores.mooncake_removal import Doomed, Remover

_ALIGNMENT_BYTES = 64

Connect = Callable[[], Objects]

_of_the_parent: list["Connection"] = []


class Connection:
    """What a reader holds open, in the process that opened it: no fork and no pickle shares it."""

    def __init__(self, objects: Objects, lease_wait_s: float) -> None:
        self.objects = objects
        self.buffers = BufferPool(objects)
        self.remover = Remover(objects, lease_wait_s)
        self.pid = os.getpid()


class MooncakeStoreReader:
    """Reads one run. May be pickled and forked: each process then opens a connection of its own."""

    verifies_by_default = True
    """A write that a dead link held up was seen to reach memory that was another object's by then,
    long after that one was committed."""

    def __init__(
        self, connect: Connect, run_id: str, *, lease_wait_s: float, force_remove: bool
    ) -> None:
        """`connect` opens a connection, and can be pickled.

        Raises ForeignStore, UnknownVersion, CorruptLog or StoreError.
        """
        self._connect = connect
        self.run_id = run_id
        self._lease_wait_s = lease_wait_s
        self._force_remove = force_remove
        self._open: Connection | None = None
        self._index: IndexReader | None = None
        self._seen: set[SampleRef] = set()  # attempts whose pages poll has returned
        self._errors: dict[str, list[tuple[str, int | None]]] = {}  # by sample: attempt, stage
        self._deletes: list[DeleteEntry] = []  # not returned yet
        self._deleted: set[SampleRef] = set()  # attempts that are known to be gone
        self.invariant = self._read_invariant()

    @property
    def connection(self) -> Connection:
        """This process's own. Raises StoreError."""
        if self._open is None or self._open.pid != os.getpid():
            if self._open is not None:
                # A fork took it along without its threads: to end it here would hang.
                _of_the_parent.append(self._open)
            self._open = Connection(self._connect(), self._lease_wait_s)
            self._index = IndexReader(self._open.objects, self.run_id)
        return self._open

    def poll_pages(self) -> list[FoundPage]:
        """The pages of the index that were not returned yet. Raises StoreError, CorruptLog."""
        _ = self.connection
        assert self._index is not None
        return self._index.poll()

    def poll(self) -> tuple[Sequence[CommitEntry], Sequence[DeleteEntry]]:
        """What was committed, and what is known to be deleted, since the last call."""
        commits = []
        for found in self.poll_pages():
            page = found.page
            if page.kind == "error":
                errors = self._errors.setdefault(page.sample_id, [])
                if (page.attempt, page.stage) not in errors:
                    errors.append((page.attempt, page.stage))
                continue
            entry = self._entry(found)
            if _ref(entry) not in self._seen:
                self._seen.add(_ref(entry))
                commits.append(entry)
        commits = self._living(commits)
        deletes, self._deletes = self._deletes, []
        return commits, deletes

    def _living(self, entries: list[CommitEntry]) -> list[CommitEntry]:
        """Those that are not deleted, or just being so. Raises StoreError."""
        objects = self.connection.objects
        # Tombstones first: to ask for a commit gives it a lease, which holds up its removal.
        tombs = objects.exist([tombstone_key(_ref(entry)) for entry in entries])
        left = [entry for entry, dying in zip(entries, tombs, strict=True) if not dying]
        commits = objects.exist([sample_commit_key(self.run_id, e.sample_id) for e in left])
        return [entry for entry, there in zip(left, commits, strict=True) if there]

    def manifest(self, entry: CommitEntry) -> Manifest:
        """The manifest of a commit. See StoreReader; SampleNotFound when it was deleted."""
        commit = self.find_commit(entry.sample_id)
        gone = commit is None or commit.manifest.attempt != entry.attempt
        if gone or self.is_dying(_ref(entry)):
            self._note_deleted(entry)
            raise SampleNotFound(
                f"sample {entry.sample_id!r} of run {self.run_id!r} is not in the store any more: "
                "it was deleted, or the process that held it has ended",
                sample_id=entry.sample_id,
            )
        assert commit is not None
        return commit.manifest

    def find_commit(self, sample_id: str) -> Commit | None:
        """The commit of a sample, without the index; None when there is none.

        Raises MalformedManifest, UnknownVersion, CorruptLog, StoreError.
        """
        key = sample_commit_key(self.run_id, sample_id)
        data = read(self.connection.objects, key)
        return None if data is None else decode_commit(key, data)

    def fragment(self, manifest: Manifest, fragment: Fragment) -> FragmentBytes:
        """The bytes of a fragment, in memory that is used again when nobody holds them.

        See StoreReader; SampleNotFound when the sample is just being deleted.
        """
        if (reason := misplaced(manifest, fragment)) is not None:
            text = f"{reason}: capture the sample again"
            raise fragment_error(ForeignFile, manifest, fragment, text)
        keys, sizes = list(payload_keys(fragment)), self._sizes(manifest, fragment)
        ids_start = -(-fragment.byte_size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        ids_bytes = 8 * manifest.token_count if fragment.input_ids else 0
        memory = self.connection.buffers.take(ids_start + ids_bytes)
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        if ids_bytes:
            keys.append(input_ids_key(fragment.path))
            sizes.append(ids_bytes)
            offsets.append(ids_start)
        start = int(memory.ctypes.data)
        found = self.connection.objects.get_into(
            keys, [start + offset for offset in offsets], sizes, keep=memory
        )
        for key, size, found_size in zip(keys, sizes, found, strict=True):
            if found_size is None:
                raise self._missing(manifest, fragment, key)
            if found_size != size:
                raise _truncated(manifest, fragment, key, found_size, size)
        # Nobody stores an attempt's keys twice: what is still there was there all the time. What is
        # not may have been removed under our hands, and other bytes been read in its place.
        for key, exists in zip(keys, self.connection.objects.exist(keys), strict=True):
            if not exists:
                raise self._missing(manifest, fragment, key)
        view = memory.data
        return FragmentBytes(
            payload=view[: fragment.byte_size],
            input_ids=view[ids_start : ids_start + ids_bytes] if ids_bytes else None,
        )

    def failures(self, run_id: str | None, sample_id: str) -> list[Failure]:
        """The errors that the index told of, if there is no commit. See StoreReader.

        A retry that is under way cannot be seen: after it has failed again, or was committed.
        """
        if run_id not in (None, self.run_id) or self.find_commit(sample_id) is not None:
            return []
        return [
            failure
            for attempt, stage in self._errors.get(sample_id, ())
            for failure in [self.failure(sample_id, attempt, stage)]
            if failure is not None
        ]

    def failure(self, sample_id: str, attempt: str, stage: int | None) -> Failure | None:
        """One recorded error; None when it was removed. Raises StoreError, CorruptLog."""
        ref = SampleRef(run_id=self.run_id, sample_id=sample_id, attempt=attempt)
        key = error_record_key(ref, stage)
        data = read(self.connection.objects, key)
        if data is None:
            return None
        cause = decode_record(key, data, ErrorRecord).cause
        return Failure(ref=ref, stage=stage, cause=cause)

    def delete(self, entries: Sequence[CommitEntry]) -> None:
        """Delete these commits and all that belongs to them. See StoreReader.

        On return nobody can take the sample any more; what is still leased is removed as soon as
        its lease ends. `settle` waits for that.
        """
        for entry in entries:
            commit = self.find_commit(entry.sample_id)
            ours = commit is not None and commit.manifest.attempt == entry.attempt
            pages = {(writer_of(entry.writer), entry.line)}
            if commit is not None and ours:
                pages.add((commit.writer, commit.seq))
            self.remove(
                Doomed(
                    ref=_ref(entry),
                    manifest=commit.manifest if commit is not None and ours else None,
                    pages=tuple(sorted(pages)),
                ),
                force=self._force_remove,
            )
            self._note_deleted(entry)

    def remove(self, doomed: Doomed, *, force: bool) -> None:
        """Remove an attempt, see Remover. Raises StoreError."""
        self.connection.remover.remove(doomed, force=force)

    def settle(self, timeout_s: float) -> None:
        """Wait until all that was deleted is gone. Raises StoreError."""
        self.connection.remover.settle(timeout_s)

    def is_dying(self, ref: SampleRef) -> bool:
        """Whether somebody has begun to remove an attempt. Raises StoreError."""
        return self.connection.objects.exist([tombstone_key(ref)])[0]

    def close(self) -> None:
        """End the connection, once what was deleted is gone, or its leases should have ended.

        Samples that are still held stay valid. Raises StoreError.
        """
        if self._open is not None and self._open.pid == os.getpid():
            try:
                self._open.remover.close()
            finally:
                self._open.objects.close()
        self._open = None
        self._index = None

    def __getstate__(self) -> dict[str, Any]:
        # The other process counts from the first page on, and knows again which it has seen.
        return self.__dict__ | {"_open": None, "_index": None}

    def _read_invariant(self) -> Invariant:
        key = invariant_key(self.run_id)
        data = read(self.connection.objects, key)
        if data is None:
            raise ForeignStore(
                f"there is no run {self.run_id!r} at this master: start its engine first, or give "
                "the run that it writes",
                path=key,
            )
        return decode_run(key, data)

    def _entry(self, found: FoundPage) -> CommitEntry:
        return CommitEntry(
            committed_at_ns=found.page.at_ns,
            writer=log_name(found.writer, found.stretch),
            line=found.seq,
            run_id=self.run_id,
            sample_id=found.page.sample_id,
            attempt=found.page.attempt,
            offset=0,
            length=0,
        )

    def _note_deleted(self, entry: CommitEntry) -> None:
        if _ref(entry) not in self._deleted:
            self._deleted.add(_ref(entry))
            self._deletes.append(
                DeleteEntry(
                    writer=f"{entry.writer}-{os.getpid()}",
                    line=len(self._deleted),
                    run_id=entry.run_id,
                    sample_id=entry.sample_id,
                    attempt=entry.attempt,
                )
            )

    def _sizes(self, manifest: Manifest, fragment: Fragment) -> list[int]:
        """Bytes of each object of the tensor: all parts are as large as the first, but the last."""
        if not fragment.parts:
            return [fragment.byte_size]
        first_key = fragment.parts[0]
        first_bytes = self.connection.objects.size(first_key)
        if first_bytes is None:
            raise self._missing(manifest, fragment, first_key)
        sizes = part_sizes(fragment.byte_size, first_bytes, len(fragment.parts))
        if sizes is None:
            raise fragment_error(
                TruncatedFragment,
                manifest,
                fragment,
                f"{len(fragment.parts)} parts of {first_bytes} bytes do not make up its "
                f"{fragment.byte_size} bytes: capture the sample again",
            )
        return list(sizes)

    def _missing(
        self, manifest: Manifest, fragment: Fragment, key: str
    ) -> MissingFragment | SampleNotFound:
        ref = ref_of(manifest)
        commit = self.find_commit(ref.sample_id)
        if commit is None or commit.manifest.attempt != ref.attempt or self.is_dying(ref):
            return SampleNotFound(
                f"sample {manifest.sample_id!r} is not in the store any more: it was deleted",
                sample_id=manifest.sample_id,
            )
        return fragment_error(
            MissingFragment,
            manifest,
            fragment,
            f"{key} is not in the store: it was removed by hand or evicted, or the process that "
            "held it has ended; capture the sample again",
        )


def _truncated(
    manifest: Manifest, fragment: Fragment, key: str, found_bytes: int, expected_bytes: int
) -> TruncatedFragment | ForeignFile:
    text = f"{key} has {found_bytes} bytes, not {expected_bytes}: capture the sample again"
    if found_bytes < expected_bytes:
        return fragment_error(TruncatedFragment, manifest, fragment, text)
    return fragment_error(ForeignFile, manifest, fragment, text)


def _ref(entry: CommitEntry) -> SampleRef:
    return SampleRef(run_id=entry.run_id, sample_id=entry.sample_id, attempt=entry.attempt)
