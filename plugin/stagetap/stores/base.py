"""What every store offers, to the three kinds of process that use one.

A worker writes fragments (`StoreWriter`), the scheduler side commits samples (`StoreCommitter`), a
trainer reads them (`StoreReader`). They share nothing but the store. No torch, no vLLM.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from stagetap.errors import Refused, StoreError
from stagetap.manifest import Fragment, Layer, Manifest
from stagetap.stores.mooncake_uri import is_mooncake

STORE_VERSION = 1


class SampleRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One attempt at one sample of one run."""

    run_id: str
    sample_id: str
    attempt: str


class Invariant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What must be equal for all writers of one store. PP and TP may differ.

    `engine_args` as in a manifest: two engines that differ there compute other states.
    """

    store_version: int = STORE_VERSION
    weights_fingerprint: str
    layer_ids: tuple[int, ...]
    stream: str
    dtype: str
    id_convention: str
    hidden_size: int
    num_hidden_layers: int
    engine_args: dict[str, str] = {}


class KnownKind(msgspec.Struct, frozen=True, kw_only=True):
    """Of an `Invariant`, what is known before an engine has started; None: it will tell."""

    layer_ids: tuple[int, ...]
    weights_fingerprint: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class FragmentHeader:
    """What is known of a fragment before its first row.

    `shape` is (T, L_stage, H); `token_ids` is int64 [T] on the lowest owning stage, else None.
    """

    ref: SampleRef
    stage: int
    layers: tuple[Layer, ...]
    dtype: str
    shape: tuple[int, int, int]
    token_ids: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class StoredFragment:
    """Where a finished fragment lies; `path` and `parts` are relative to the store.

    `file_bytes` is None where the tensor is not within a larger file.
    """

    path: str
    file_bytes: int | None
    parts: tuple[str, ...] = ()


class FragmentWriter(Protocol):
    """Writes one fragment, from one thread. Ends with exactly one of `finish` and `abort`."""

    def write(self, pieces: Sequence[memoryview]) -> None:
        """Append whole rows: the bytes of these pieces of memory, one after the other.

        The memory is free again on return, however it ends. Raises StoreError.
        """

    def finish(self) -> StoredFragment:
        """Make the fragment durable under its final name. Raises StoreError, also if short."""

    def abort(self) -> None:
        """Remove what was written. Raises StoreError when that cannot be done."""


class StoreWriter(Protocol):
    """The worker's side. Opening one proves that the store can be reached and written to.

    `takes_pages`: whether rows may be written from the cache pages in which they are. A store that
    waits for a disk takes none: what others compute in would wait as well.
    """

    takes_pages: bool

    def read_nonces(self) -> list[str]:
        """The nonces that committers left in this store. Raises StoreError."""

    def use_memory(self, memory: memoryview) -> None:
        """Learn, before the first fragment from it, of memory in which rows will be.

        It stays where it is until `close`. Raises StoreError.
        """

    def open_fragment(self, header: FragmentHeader) -> FragmentWriter:
        """Start a fragment. Raises StoreError. Safe to call from several threads."""

    def close(self) -> None:
        """Let go of what is held open."""


class StoreCommitter(Protocol):
    """The scheduler's side. Safe to call from several threads."""

    def leave_nonce(self, nonce: str) -> None:
        """Leave `nonce` where every worker that shares this store reads it.

        Raises Refused when the place is somebody else's, StoreError.
        """

    def begin_run(self, invariant: Invariant) -> None:
        """Claim the store for this kind of data.

        Raises Refused when the store holds another kind of data, StoreError when it cannot be used.
        """

    def is_committed(self, run_id: str, sample_id: str) -> bool:
        """Whether a commit exists, by whichever writer. Raises StoreError."""

    def commit(self, manifest: Manifest) -> None:
        """Make the sample visible and durable; on return it is both.

        Raises DuplicateSample, MalformedManifest or StoreError; then it is neither.
        """

    def discard(self, fragment: Fragment) -> None:
        """Forget a fragment that no commit will ever name. Raises StoreError."""

    def record_error(self, ref: SampleRef, stage: int | None, cause: str) -> None:
        """Leave the cause of a failed attempt for readers that wait. Raises StoreError."""

    def close(self) -> None:
        """Let go of what is held open. Commits stay."""


class CommitEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One commit as the reader's index holds it.

    `line` counts from 0 within the writer's log; `offset` and `length` place the manifest's bytes.
    """

    committed_at_ns: int
    writer: str
    line: int
    run_id: str
    sample_id: str
    attempt: str
    offset: int
    length: int

    @property
    def order(self) -> tuple[int, str, int]:
        """The key of the one order in which all readers see commits."""
        return (self.committed_at_ns, self.writer, self.line)


class DeleteEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One deletion of one attempt; `line` counts from 0 within the log of the one who deleted."""

    writer: str
    line: int
    run_id: str
    sample_id: str
    attempt: str


@dataclass(frozen=True, kw_only=True)
class FragmentBytes:
    """The stored bytes of a fragment, mapped and not copied.

    `payload` holds the tensor [T, L_stage, H] in row order, `input_ids` int64 [T] if stored here.
    Writing to them changes no file.
    """

    payload: memoryview
    input_ids: memoryview | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One recorded error of one attempt."""

    ref: SampleRef
    stage: int | None
    cause: str


class StoreReader(Protocol):
    """The trainer's side. May be pickled; each process polls for itself."""

    invariant: Invariant
    verifies_by_default: bool
    """Whether checksums are compared unless the caller says: where bytes may change after they
    were stored."""

    def poll(self) -> tuple[Sequence[CommitEntry], Sequence[DeleteEntry]]:
        """Commits and deletions that appeared since the last call, per writer in line order.

        Raises StoreError; CorruptLog when a line cannot be read.
        """

    def manifest(self, entry: CommitEntry) -> Manifest:
        """The manifest of a commit. Raises MalformedManifest, UnknownVersion or StoreError."""

    def fragment(self, manifest: Manifest, fragment: Fragment) -> FragmentBytes:
        """The bytes of a fragment, sizes and identity checked.

        Raises MissingFragment, TruncatedFragment, ForeignFile or StoreError.
        """

    def failures(self, run_id: str | None, sample_id: str) -> list[Failure]:
        """The recorded errors, if every attempt at the sample has failed; else none."""

    def delete(self, entries: Sequence[CommitEntry]) -> None:
        """Delete these commits and their fragments; what is deleted already is no error."""


def open_store_writer(uri: str | os.PathLike[str]) -> StoreWriter:
    """The worker's side of the store at `uri`, proven writable. Raises Refused, StoreError."""
    if is_mooncake(os.fspath(uri)):
        from stagetap.stores.mooncake_open import open_writer

        return open_writer(os.fspath(uri))
    from stagetap.stores.file_writer import FileStoreWriter

    return FileStoreWriter(file_root(uri))


def open_store_committer(uri: str | os.PathLike[str]) -> StoreCommitter:
    """The scheduler's side of the store at `uri`. Raises Refused or StoreError."""
    if is_mooncake(os.fspath(uri)):
        from stagetap.stores.mooncake_open import open_committer

        return open_committer(os.fspath(uri))
    from stagetap.stores.file_committer import FileStoreCommitter

    return FileStoreCommitter(file_root(uri))


def open_store_reader(uri: str | os.PathLike[str]) -> StoreReader:
    """The trainer's side of the store at `uri`. Raises Refused, ForeignStore or StoreError."""
    if is_mooncake(os.fspath(uri)):
        from stagetap.stores.mooncake_open import open_reader

        return open_reader(os.fspath(uri))
    from stagetap.stores.file_reader import FileStoreReader

    return FileStoreReader(file_root(uri))


def check_store(uri: str | os.PathLike[str], known: KnownKind) -> None:
    """Refuse, before any engine starts, a store that its data cannot go to. Takes moments.

    Raises Refused or StoreError.
    """
    if is_mooncake(os.fspath(uri)):
        from stagetap.stores.mooncake_open import check_reachable

        check_reachable(os.fspath(uri))
        return
    from stagetap.stores.file_invariant import check_usable

    check_usable(file_root(uri), known)


def check_stored(uri: str | os.PathLike[str], known: KnownKind) -> None:
    """Refuse, before any engine starts, a run in Mooncake that holds other data.

    Apart from :func:`check_store`, which knows it of directories: asking Mooncake takes seconds.
    Raises Refused or StoreError.
    """
    if is_mooncake(os.fspath(uri)):
        from stagetap.stores.mooncake_open import check_run

        check_run(os.fspath(uri), known)


def check_store_writable(uri: str | os.PathLike[str]) -> None:
    """Refuse, before any engine starts, a directory that nothing can be written to.

    Apart from :func:`check_store`, since who only looks does without. Raises Refused.
    """
    if is_mooncake(os.fspath(uri)):
        return
    from stagetap.stores.file_io import check_writable

    try:
        check_writable(file_root(uri))
    except StoreError as error:
        raise Refused(str(error)) from error


def store_address(uri: str | os.PathLike[str]) -> str:
    """The address as every process can use it, wherever it was started. Raises Refused."""
    return os.fspath(uri) if is_mooncake(os.fspath(uri)) else file_root(uri)


def capacity_bytes(uri: str | os.PathLike[str], workers: int) -> int | None:
    """Bytes of samples that a store with so many workers can hold at once; None if unknown."""
    if is_mooncake(os.fspath(uri)):
        from stagetap.stores.mooncake_open import lent_bytes

        return lent_bytes(os.fspath(uri), workers)
    return None


def file_root(uri: str | os.PathLike[str]) -> str:
    """The absolute directory that a store address names: a path or `file:///path`.

    Raises Refused for any other scheme.
    """
    text = os.fspath(uri)
    scheme, separator, rest = text.partition("://")
    if not separator:
        if not text:
            raise Refused("an empty store address: give a directory")
        return os.path.abspath(text)
    if scheme == "mooncake":
        raise Refused(f"{text}: this command works on directories alone: give one")
    if scheme != "file":
        raise Refused(
            f"{text}: unknown store scheme {scheme!r}: give a directory, "
            "file:///path, or where a command takes it mooncake://MASTER:PORT/RUN"
        )
    if not rest.startswith("/"):
        raise Refused(f"{text}: a file address needs an absolute path: file:///path")
    return os.path.abspath(rest)
