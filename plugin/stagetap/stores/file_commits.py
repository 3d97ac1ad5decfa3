"""What the lines of the commit and delete logs say."""

import os
import time
from collections.abc import Collection

import msgspec

from stagetap.errors import CorruptLog
from stagetap.manifest import Manifest, decode, encode
from stagetap.stores.base import CommitEntry, DeleteEntry
from stagetap.stores.file_layout import COMMITS, DELETES, LOG_SUFFIX
from stagetap.stores.file_log import Line, LogFolder


class _Named(msgspec.Struct, frozen=True):
    """The fields of a manifest that an index needs, of whichever version the manifest is."""

    run_id: str
    sample_id: str
    attempt: str


class _CommitIndexLine(msgspec.Struct, frozen=True):
    committed_at_ns: int
    manifest: _Named


class _CommitLine(msgspec.Struct, frozen=True):
    manifest: msgspec.Raw


_decode_index_line = msgspec.json.Decoder(_CommitIndexLine).decode
_decode_commit_line = msgspec.json.Decoder(_CommitLine).decode
_decode_delete_line = msgspec.json.Decoder(_Named).decode


def commit_body(committed_at_ns: int, manifest: Manifest) -> bytes:
    """The log entry of a commit. Raises MalformedManifest or Refused."""
    return b'{"committed_at_ns":%d,"manifest":%b}' % (committed_at_ns, encode(manifest))


def manifest_of(body: bytes) -> Manifest:
    """The manifest in a log entry. Raises MalformedManifest or UnknownVersion."""
    return decode(_decode_commit_line(body).manifest)


def delete_body(entry: CommitEntry) -> bytes:
    """The log entry of a deletion, of one attempt."""
    fields = {
        "deleted_at_ns": time.time_ns(),
        "run_id": entry.run_id,
        "sample_id": entry.sample_id,
        "attempt": entry.attempt,
    }
    return msgspec.json.encode(fields)


class Ledger:
    """Both kinds of logs of a store, read onwards from the last call."""

    def __init__(self, root: str) -> None:
        self._commits_directory = os.path.join(root, COMMITS)
        self._deletes_directory = os.path.join(root, DELETES)
        self._commits = LogFolder(self._commits_directory)
        self._deletes = LogFolder(self._deletes_directory)

    def poll(
        self, own_writers: Collection[str] = ()
    ) -> tuple[list[CommitEntry], list[DeleteEntry]]:
        """What was added since the last call that succeeded. Raises CorruptLog or StoreError.

        Commits of `own_writers` are left out: who writes them knows them.
        """
        # In this order every deletion that is seen is one of a commit that is seen.
        deletes, delete_marks = self._deletes.read(self._delete_entry)
        commits, commit_marks = self._commits.read(self._commit_entry, own_writers)
        self._deletes.advance(delete_marks)
        self._commits.advance(commit_marks)
        return commits, deletes

    def poll_deletes(self) -> list[DeleteEntry]:
        """As `poll`, of the deletions alone."""
        deletes, marks = self._deletes.read(self._delete_entry)
        self._deletes.advance(marks)
        return deletes

    def manifest(self, entry: CommitEntry) -> Manifest:
        """The manifest of a commit. Raises MalformedManifest, UnknownVersion or StoreError."""
        return manifest_of(self._commits.line(entry.writer, entry.offset, entry.length))

    def _commit_entry(self, line: Line) -> CommitEntry:
        try:
            head = _decode_index_line(line.body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise _not_an_entry(self._commits_directory, line, error) from error
        return CommitEntry(
            committed_at_ns=head.committed_at_ns,
            writer=line.writer,
            line=line.number,
            run_id=head.manifest.run_id,
            sample_id=head.manifest.sample_id,
            attempt=head.manifest.attempt,
            offset=line.offset,
            length=line.length,
        )

    def _delete_entry(self, line: Line) -> DeleteEntry:
        try:
            named = _decode_delete_line(line.body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise _not_an_entry(self._deletes_directory, line, error) from error
        return DeleteEntry(
            writer=line.writer,
            line=line.number,
            run_id=named.run_id,
            sample_id=named.sample_id,
            attempt=named.attempt,
        )


def _not_an_entry(directory: str, line: Line, error: Exception) -> CorruptLog:
    path = os.path.join(directory, line.writer + LOG_SUFFIX)
    return CorruptLog(
        f"{path} line {line.number + 1} is whole but is no entry of this version ({error}): read "
        "the store with the version that wrote it",
        path=path,
        line=line.number + 1,
    )
