"""What Mooncake's status codes mean, as exceptions of ours. Pure."""

from __future__ import annotations

from stagetap.errors import StoreError
from stagetap.stores.mooncake_objects import MAKE_ROOM, StoreFull

NO_SPACE = -200
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASED = -706
LEASE_ENDED = -707

_MEANINGS = {
    -1: "an internal error of Mooncake; its log on stderr has the cause",
    NO_SPACE: f"no segment has room for it, or there is no segment: {MAKE_ROOM}",
    -600: "invalid parameters: an empty object, an object larger than the place for it, or "
    "larger than local_buffer_size",
    NOT_READY: "it is still being written",
    NOT_FOUND: "there is no such object",
    EXISTS: "it exists already",
    LEASED: "somebody is reading it: it can be removed when that lease has ended",
    LEASE_ENDED: "the lease ended while it was being read",
    -800: "the transfer between the hosts failed: is the host that holds it up, and does it use "
    "the same protocol?",
    -900: "the master does not answer: start it at this address (`stagetap store up`), or mend the "
    "network",
    -901: "the master did not answer in time: start it again if it hangs, or give a longer "
    "rpc_timeout",
}


class StatusError(StoreError):
    """Mooncake refused one operation on one object; `code` is its status code."""

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        size_bytes: int | None = None,
        code: int | None = None,
    ) -> None:
        super().__init__(message, path=path, size_bytes=size_bytes)
        self.code = code


class ObjectMissing(StatusError):
    """There is no such object."""


class ObjectExists(StatusError):
    """There is such an object already."""


class ObjectLeased(StatusError):
    """Somebody is reading the object, so it cannot be removed yet."""


class LeaseExpired(StatusError):
    """The lease on an object ended while it was being read: what was read may be wrong."""


class MasterUnreachable(StatusError):
    """The master did not answer. It is asked anew with every operation."""


_KINDS: dict[int, type[StatusError]] = {
    NOT_FOUND: ObjectMissing,
    EXISTS: ObjectExists,
    LEASED: ObjectLeased,
    LEASE_ENDED: LeaseExpired,
    -900: MasterUnreachable,
    -901: MasterUnreachable,
}


def failure(doing: str, key: str, code: int, size_bytes: int | None = None) -> StoreError:
    """The exception for a status code below 0, naming operation, key and code."""
    meaning = _MEANINGS.get(code, "a status that this version does not know")
    size = "" if size_bytes is None else f" ({size_bytes} bytes)"
    message = f"mooncake: {doing} {key}{size}: {meaning} (status {code})"
    if code == NO_SPACE:
        return StoreFull(message, path=key, size_bytes=size_bytes)
    kind = _KINDS.get(code, StatusError)
    return kind(message, path=key, size_bytes=size_bytes, code=code)
