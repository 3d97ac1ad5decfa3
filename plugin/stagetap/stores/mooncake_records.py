"""What the small objects of the Mooncake store say, as bytes. Pure.

Each is a line with a checksum, then one JSON document. An object is there whole or not at all, but
a read may meet its removal, and bring what was stored in its place: perhaps an object of the same
kind. So the checksum is over key and document.
"""

from typing import Literal, TypeVar

import msgspec
import xxhash

from stagetap.errors import CorruptLog
from stagetap.manifest import Manifest, decode, encode
from stagetap.stores.base import Invariant
from stagetap.stores.kind import decode_invariant

Record = TypeVar("Record", bound=msgspec.Struct)


class WriterRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A committer introduces itself; `nonce` is what workers must read back."""

    writer: str
    nonce: str


class Page(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A page of the index: this attempt was committed, or failed on `stage`, at this time."""

    kind: Literal["commit", "error"]
    at_ns: int
    sample_id: str
    attempt: str
    stage: int | None = None


class Mark(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A writer has at least so many pages."""

    pages: int


class ErrorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Why an attempt failed."""

    attempt: str
    stage: int | None
    cause: str
    failed_at_ns: int


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who made a claim, an acknowledgement or a tombstone."""

    consumer: str


class _Commit(msgspec.Struct, frozen=True):
    committed_at_ns: int
    writer: str
    seq: int
    manifest: msgspec.Raw


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """A commit: the manifest, and where the page is that tells of it."""

    committed_at_ns: int
    writer: str
    seq: int
    manifest: Manifest


def seal(key: str, document: bytes) -> bytes:
    """A document as it is stored at `key`, behind its checksum."""
    return b"%b\n%b" % (_checksum(key, document), document)


def is_intact(key: str, data: bytes) -> bool:
    """Whether these bytes are what was sealed for `key`."""
    checksum, _, document = data.partition(b"\n")
    return checksum == _checksum(key, document)


def unseal(key: str, data: bytes) -> bytes:
    """The document of a sealed object. Raises CorruptLog."""
    if not is_intact(key, data):
        raise CorruptLog(
            f"{key} is damaged or was not written by StageTap: start another run", path=key
        )
    return data.partition(b"\n")[2]


def _checksum(key: str, document: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(b"%b\n%b" % (key.encode(), document)).encode()


def encode_record(key: str, record: msgspec.Struct) -> bytes:
    """A record as it is stored at `key`."""
    return seal(key, msgspec.json.encode(record))


def decode_record(key: str, data: bytes, kind: type[Record]) -> Record:
    """The record at `key`. Raises CorruptLog for what is none of this kind."""
    document = unseal(key, data)
    try:
        return msgspec.json.decode(document, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CorruptLog(
            f"{key} is whole but not of this version ({error}): read the run with the version "
            "that wrote it",
            path=key,
        ) from error


def encode_commit(
    key: str, committed_at_ns: int, writer: str, seq: int, manifest: Manifest
) -> bytes:
    """A commit as it is stored at `key`. Raises MalformedManifest or Refused."""
    commit = _Commit(committed_at_ns, writer, seq, msgspec.Raw(encode(manifest)))
    return seal(key, msgspec.json.encode(commit))


def decode_commit(key: str, data: bytes) -> Commit:
    """The commit at `key`. Raises CorruptLog, MalformedManifest or UnknownVersion."""
    raw = decode_record(key, data, _Commit)
    return Commit(
        committed_at_ns=raw.committed_at_ns,
        writer=raw.writer,
        seq=raw.seq,
        manifest=decode(raw.manifest),
    )


def decode_run(key: str, data: bytes) -> Invariant:
    """What a run holds. Raises UnknownVersion, ForeignStore or CorruptLog."""
    return decode_invariant(unseal(key, data), key, "give another run")
