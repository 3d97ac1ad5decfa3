"""The trainer's side of the file store: commits in order, fragments mapped and not copied."""

import mmap
import os
from collections.abc import Iterator, Sequence

import msgspec

from stagetap.errors import ForeignFile, MissingFragment, StoreError, TruncatedFragment
from stagetap.keys import component
from stagetap.manifest import Fragment, Manifest
from stagetap.stores.base import CommitEntry, DeleteEntry, Failure, FragmentBytes, SampleRef
from stagetap.stores.checks import fragment_error
from stagetap.stores.file_commits import Ledger
from stagetap.stores.file_invariant import read_invariant
from stagetap.stores.file_io import listed, naming
from stagetap.stores.file_layout import (
    TOP_LEVEL,
    NotAFragment,
    decode_head,
    head_of,
    is_error_record,
)
from stagetap.stores.file_removal import Deletions, attempt_directory, remove_attempt


class _ErrorRecord(msgspec.Struct):
    run_id: str
    sample_id: str
    attempt: str
    stage: int | None
    cause: str


class FileStoreReader:
    """Reads one directory. May be pickled and forked: each process that deletes has its own log."""

    verifies_by_default = False

    def __init__(self, root: str) -> None:
        """Raises ForeignStore, UnknownVersion or StoreError."""
        self._root = root
        self.invariant = read_invariant(root)
        self._ledger = Ledger(root)
        self._deletions = Deletions(root)

    def poll(self) -> tuple[Sequence[CommitEntry], Sequence[DeleteEntry]]:
        """What was committed and deleted since the last call. See StoreReader."""
        return self._ledger.poll()

    def manifest(self, entry: CommitEntry) -> Manifest:
        """The manifest of a commit. See StoreReader."""
        return self._ledger.manifest(entry)

    def fragment(self, manifest: Manifest, fragment: Fragment) -> FragmentBytes:
        """The bytes of a fragment, sizes and identity checked. See StoreReader."""
        file = self._map(manifest, fragment)
        try:
            head, start = decode_head(file)
        except NotAFragment as error:
            raise _foreign(manifest, fragment, str(error)) from error
        ref = SampleRef(
            run_id=manifest.run_id, sample_id=manifest.sample_id, attempt=manifest.attempt
        )
        expected = head_of(
            ref, fragment.stage, fragment.layers, fragment.dtype, fragment.shape, fragment.input_ids
        )
        if head != expected:
            raise _foreign(manifest, fragment, f"it says of itself {head.metadata}")
        ids_end, end = (start + offset for offset in expected.hidden_states.data_offsets)
        if end != len(file):
            raise _foreign(manifest, fragment, "its tensors do not fill it")
        return FragmentBytes(
            payload=file[ids_end:],
            input_ids=file[start:ids_end] if fragment.input_ids else None,
        )

    def failures(self, run_id: str | None, sample_id: str) -> list[Failure]:
        """The recorded errors, if every attempt at the sample has failed. See StoreReader."""
        failures: list[Failure] = []
        for run in [component(run_id)] if run_id is not None else self._runs():
            sample = os.path.join(self._root, run, component(sample_id))
            for attempt in _subdirectories(sample):
                found = list(_error_records(os.path.join(sample, attempt)))
                if not found:
                    return []
                failures += found
        return failures

    def delete(self, entries: Sequence[CommitEntry]) -> None:
        """Write the deletions down, then remove the files. See StoreReader."""
        self._deletions.add(entries)
        for entry in entries:
            remove_attempt(self._root, attempt_directory(entry))

    def _map(self, manifest: Manifest, fragment: Fragment) -> memoryview:
        """The whole file, private to us: what a trainer writes to it reaches nobody else."""
        path = os.path.join(self._root, fragment.path)
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            reason = f"{path} is missing: restore it or capture the sample again"
            raise fragment_error(MissingFragment, manifest, fragment, reason) from error
        except OSError as error:
            reason = f"cannot open {path} ({error.strerror}): make it a readable file"
            raise fragment_error(ForeignFile, manifest, fragment, reason) from error
        try:
            found_bytes = os.fstat(fd).st_size
            _check_size(manifest, fragment, found_bytes)
            return memoryview(mmap.mmap(fd, found_bytes, access=mmap.ACCESS_COPY))
        except OSError as error:
            reason = f"cannot map {path} ({error.strerror}): copy the store to another file system"
            raise fragment_error(ForeignFile, manifest, fragment, reason) from error
        finally:
            os.close(fd)

    def _runs(self) -> list[str]:
        return [name for name in _subdirectories(self._root) if name not in TOP_LEVEL]


def _subdirectories(path: str) -> list[str]:
    """The directories in `path` that are not half-written; none where it does not exist."""
    return [
        name for name in listed(path) if name[0] != "." and os.path.isdir(os.path.join(path, name))
    ]


def _error_records(attempt: str) -> Iterator[Failure]:
    for name in listed(attempt):
        if is_error_record(name):
            path = os.path.join(attempt, name)
            with naming("read", path), open(path, "rb") as file:
                text = file.read()
            try:
                record = msgspec.json.decode(text, type=_ErrorRecord)
            except (msgspec.MsgspecError, UnicodeError) as error:
                raise StoreError(f"{path} is no error record ({error}): remove it") from error
            ref = SampleRef(
                run_id=record.run_id, sample_id=record.sample_id, attempt=record.attempt
            )
            yield Failure(ref=ref, stage=record.stage, cause=record.cause)


def _check_size(manifest: Manifest, fragment: Fragment, found_bytes: int) -> None:
    expected_bytes = fragment.file_bytes
    if found_bytes < (expected_bytes or fragment.byte_size):
        raise fragment_error(
            TruncatedFragment,
            manifest,
            fragment,
            f"{fragment.path} has {found_bytes} bytes of {expected_bytes or fragment.byte_size}: "
            "restore it or capture the sample again",
        )
    if expected_bytes is not None and found_bytes > expected_bytes:
        raise _foreign(manifest, fragment, f"it has {found_bytes} bytes, not {expected_bytes}")


def _foreign(manifest: Manifest, fragment: Fragment, reason: str) -> ForeignFile:
    text = f"{fragment.path} is another file, {reason}: restore it or capture the sample again"
    return fragment_error(ForeignFile, manifest, fragment, text)
