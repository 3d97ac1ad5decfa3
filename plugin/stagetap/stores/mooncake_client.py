"""A connection to a Mooncake store: every operation bounded in time, every failure named.

It survives its master: after a restart Mooncake's client mounts its memory anew by itself, within
about a second, and operations succeed again. Until then they fail, each with a named error. What
was stored is gone with the old master.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from stagetap.errors import Refused, StoreError
from stagetap.hosts.address import check_own
from stagetap.stores.mooncake_calls import BoundedCalls, Result
from stagetap.stores.mooncake_memory import check_fits
from stagetap.stores.mooncake_objects import Placed, StoreFull, create, read
from stagetap.stores.mooncake_package import check_version, load_mooncake, tell_library
from stagetap.stores.mooncake_probe import probe_master
from stagetap.stores.mooncake_records import is_intact, seal, unseal
from stagetap.stores.mooncake_status import (
    LEASE_ENDED,
    LEASED,
    NOT_FOUND,
    NOT_READY,
    StatusError,
    failure,
)
from stagetap.stores.mooncake_uri import MooncakeOptions

Role = Literal["writer", "committer", "reader"]

PROTOCOL_KEY = "stagetap.protocol"
"""The object in which processes that share a store say how bytes travel."""

_RDMA_DEVICES = Path("/sys/class/infiniband")
_CLOSE_SECONDS = 5.0
_GET_TRIES = 2

log = logging.getLogger(__name__)


def open_client(options: MooncakeOptions, role: Role) -> MooncakeClient:
    """A client, proven to reach its store: 30 s at most by default, less when there is no master.

    A writer lends `options.global_segment_size` to the store, and stores, reads and removes a small
    object; other roles lend nothing.

    Raises:
        Refused: no usable Mooncake package, more memory than this machine has, or a protocol that
            this machine or store has not.
        StoreError: no master at the address, or one that cannot be worked with.
    """
    check_machine(options, role)
    check_version()
    local = probe_master(options.master, options.connect_timeout)
    tell_library(options.rpc_timeout, options.host or local)
    module = load_mooncake()
    client = MooncakeClient(module, options)
    try:
        client._set_up(role, options.host or local)
        if role == "writer":
            client._prove_writable()
        client._agree_on_protocol(role)
    except BaseException:
        client.close()
        raise
    return client


class MooncakeClient:
    """Implements `stagetap.stores.mooncake_objects.Objects`. Safe to call from several threads.

    An operation that has not returned in time raises CallTimeout and goes on: the memory that it
    was given must stay alive, and what it reads unused, until the exception's `returned` is set.
    `keep`, where there is one, is any object that shall live until then, such as the array whose
    address is given. After a fork the child has to open a client of its own.
    """

    def __init__(self, module: Any, options: MooncakeOptions) -> None:
        """Not connected yet: use `open_client`."""
        self.options = options
        self._module = module
        self._store = module.MooncakeDistributedStore()
        self._calls = BoundedCalls("mooncake")
        self._registered: dict[int, tuple[int, object]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    def put(self, key: str, data: bytes) -> None:
        """Store an object. Where one is, or is just being made, nothing happens.

        Raises StoreFull, StatusError or CallTimeout; StoreError for one that is empty or larger
        than `local_buffer_size`.
        """
        if not data:
            raise StoreError(f"mooncake: put {key}: an object cannot be empty", path=key)
        if len(data) > self.options.local_buffer_size:
            raise StoreError(
                f"mooncake: put {key}: {len(data)} bytes do not fit local_buffer_size "
                f"({self.options.local_buffer_size}): set it larger",
                path=key,
                size_bytes=len(data),
            )
        config = self._config()
        code = self._call(
            lambda: self._store.put(key, data, config), self.options.put_timeout, f"put {key}", key
        )
        self._check_put(key, code, len(data))

    def put_from(self, objects: Sequence[Placed], *, keep: object = None) -> None:
        """Store objects from registered memory, of any size, all at once.

        Raises as `put`, for the first object that failed; others may be stored.
        """
        keys = [each.key for each in objects]
        addresses = [[address for address, _ in each.pieces] for each in objects]
        sizes = [[size for _, size in each.pieces] for each in objects]
        config = self._config()
        codes = self._call(
            lambda: self._store.batch_put_from_multi_buffers(keys, addresses, sizes, config),
            self.options.put_timeout,
            f"put {', '.join(keys)}",
            keys[0],
            keep,
        )
        for each, code in zip(objects, codes, strict=True):
            self._check_put(each.key, code, each.size_bytes)

    def get(self, key: str) -> bytes | None:
        """The object; None when there is none, or it is just being written.

        Raises StatusError, CallTimeout or StoreError.
        """
        size: int | None = None
        for _ in range(_GET_TRIES):
            data: bytes = self._call(
                lambda: self._store.get(key), self.options.get_timeout, f"get {key}", key
            )
            if data:
                return data
            # Empty says only that it failed; its size says why. When that is well, perhaps the
            # object has only become whole between the two questions.
            try:
                size = self.size(key)
            except StatusError as error:
                if error.code != NOT_READY:
                    raise
                return None
            if size is None:
                return None
        assert size is not None
        if size > self.options.local_buffer_size:
            raise StoreError(
                f"mooncake: get {key}: {size} bytes do not fit local_buffer_size "
                f"({self.options.local_buffer_size}): set it larger",
                path=key,
                size_bytes=size,
            )
        raise failure("get", key, -800, size)

    def get_into(
        self,
        keys: Sequence[str],
        addresses: Sequence[int],
        sizes_bytes: Sequence[int],
        *,
        keep: object = None,
    ) -> list[int | None]:
        """Objects into registered memory: how many bytes each had; None where there is none.

        An object larger than its place is not read. A lease that ends meanwhile is taken once more.
        Raises StatusError, CallTimeout.
        """
        if not keys:
            return []
        for _ in range(_GET_TRIES):
            codes = self._call(
                lambda: self._store.batch_get_into(list(keys), list(addresses), list(sizes_bytes)),
                self.options.get_timeout,
                f"get {', '.join(keys)}",
                keys[0],
                keep,
            )
            if LEASE_ENDED not in codes:
                break
        for key, code, place in zip(keys, codes, sizes_bytes, strict=True):
            if code < 0 and code != NOT_FOUND:
                raise failure("get", key, code, place)
        return [None if code < 0 else code for code in codes]

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which of the keys hold an object. Asking gives those a lease. Raises StatusError."""
        return self.ask_exist(keys)() if keys else []

    def ask_exist(self, keys: Sequence[str]) -> Callable[[], list[bool]]:
        """As `exist`, but do not wait: what is returned does. Raises StatusError, both times."""
        answer = self._start(
            lambda: self._store.batch_is_exist(list(keys)),
            self.options.rpc_timeout,
            f"look for {keys[0]}",
            keys[0],
        )

        def exist() -> list[bool]:
            codes = answer()
            for key, code in zip(keys, codes, strict=True):
                if code < 0:
                    raise failure("look for", key, code)
            return [code == 1 for code in codes]

        return exist

    def size(self, key: str) -> int | None:
        """Bytes of an object; None when there is none. Raises StatusError."""
        size: int = self._ask(lambda: self._store.get_size(key), f"size of {key}", key)
        if size == NOT_FOUND:
            return None
        if size < 0:
            raise failure("size of", key, size)
        return size

    def remove(self, keys: Sequence[str], *, force: bool = False) -> list[str]:
        """Remove objects; the keys that stay because somebody reads them, never with `force`.

        That there is none is no error. Raises StatusError.
        """
        if not keys:
            return []
        codes = self._ask(
            lambda: self._store.batch_remove(list(keys), force), f"remove {keys[0]}", keys[0]
        )
        for key, code in zip(keys, codes, strict=True):
            if code < 0 and code not in (NOT_FOUND, LEASED):
                raise failure("remove", key, code)
        return [key for key, code in zip(keys, codes, strict=True) if code == LEASED]

    def register(self, address: int, size_bytes: int, owner: object = None) -> None:
        """Let transfers use this memory; `owner` is kept alive for as long as they may.

        Raises StatusError, also for memory that is registered already.
        """
        what = f"register {size_bytes} bytes of memory"
        code = self._ask(lambda: self._store.register_buffer(address, size_bytes), what)
        if code != 0:
            raise failure("register", "memory", code, size_bytes)
        with self._lock:
            self._registered[address] = (size_bytes, owner)

    def unregister(self, address: int) -> None:
        """End that, before the memory goes. Raises StatusError."""
        code = self._ask(lambda: self._store.unregister_buffer(address), "unregister memory")
        with self._lock:
            self._registered.pop(address, None)
        if code != 0:
            raise failure("unregister", "memory", code)

    def close(self) -> None:
        """End the connection, with what this process lent to the store. Twice is no error.

        Takes back nothing when the master hangs: closing would hold up the whole process. Then the
        memory is given back when the process ends.
        """
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
        returned = self._calls.end(_CLOSE_SECONDS)
        if returned and _answers_or_is_gone(self.options.master):
            self._store.close()
        else:
            log.warning(
                "mooncake master %s hangs: the client is left to the end of this process",
                self.options.master,
            )
            # For ever: the last reference to go would close it after all.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object((self._store, self._registered)))

    def _set_up(self, role: Role, host: str) -> None:
        options = self.options
        lent = options.global_segment_size if role == "writer" else 0
        code = self._call(
            lambda: self._store.setup(
                host,
                options.metadata_server,
                lent,
                options.local_buffer_size,
                options.protocol,
                ",".join(options.device_names),
                options.master,
            ),
            options.setup_timeout,
            f"connect to master {options.master}",
            options.master,
        )
        if code != 0:
            raise failure(f"connect from {host} to", f"master {options.master}", code)

    def _prove_writable(self) -> None:
        """Store, read and remove a small object, wherever it lands."""
        key = f"stagetap.hello.{uuid.uuid4().hex}"
        try:
            self.put(key, key.encode())
        except StoreFull:
            if self.options.global_segment_size:
                return  # There is a segment, ours at least; it may be emptied later.
            raise StoreError(
                f"mooncake store at {self.options.master}: nobody lends it memory: start a "
                "standalone client, or set global_segment_size"
            ) from None
        found = self.get(key)
        self.remove([key], force=True)
        if found != key.encode():
            raise StoreError(
                f"mooncake store at {self.options.master}: what was stored cannot be read back"
            )

    def _agree_on_protocol(self, role: Role) -> None:
        """Raise Refused when the store's other processes use another protocol.

        Nothing else would: bytes that cannot travel time out, much later and elsewhere.
        """
        ours = self.options.protocol
        note = seal(PROTOCOL_KEY, ours.encode())
        found = read(self, PROTOCOL_KEY)
        if found is not None and not is_intact(PROTOCOL_KEY, found):
            log.warning(
                "mooncake store at %s: %s is damaged: writers put it anew",
                self.options.master,
                PROTOCOL_KEY,
            )
            if role == "writer":
                self.remove([PROTOCOL_KEY], force=True)
            found = None
        if found is None and role == "writer":
            try:
                found = create(self, PROTOCOL_KEY, note, timeout_s=0)
            except StoreFull:
                log.debug("a full store: its protocol is not noted")
        if found not in (None, note):
            theirs = unseal(PROTOCOL_KEY, found).decode()
            raise Refused(
                f"mooncake store at {self.options.master}: others use protocol={theirs} and this "
                f"address says protocol={ours}: say the same everywhere"
            )

    def _config(self) -> Any:
        """How objects are kept."""
        options = self.options
        config = self._module.ReplicateConfig()
        config.replica_num = options.replicas
        config.with_hard_pin = options.hard_pin
        if options.soft_pin:
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = round(1000 * options.soft_pin)
        return config

    def _check_put(self, key: str, code: int, size_bytes: int) -> None:
        if code == NOT_FOUND:
            raise StatusError(
                f"mooncake: put {key} ({size_bytes} bytes): the host of the memory that it went to "
                f"was lost meanwhile (status {code})",
                path=key,
                size_bytes=size_bytes,
                code=code,
            )
        if code != 0:
            raise failure("put", key, code, size_bytes)
        if self.options.replicas > 1:
            # With fewer segments than copies Mooncake makes fewer, and says that all is well.
            made = len(self._ask(lambda: self._store.get_replica_desc(key), f"look at {key}", key))
            if made < self.options.replicas:
                raise StoreError(
                    f"mooncake: put {key}: {made} of {self.options.replicas} copies: there are "
                    "fewer segments with room than copies asked for: add segments, or lower "
                    "replicas",
                    path=key,
                    size_bytes=size_bytes,
                )

    def _ask(self, call: Callable[[], Result], what: str, path: str | None = None) -> Result:
        return self._call(call, self.options.rpc_timeout, what, path)

    def _call(
        self,
        call: Callable[[], Result],
        timeout_s: float,
        what: str,
        path: str | None = None,
        keep: object = None,
    ) -> Result:
        return self._start(call, timeout_s, what, path, keep)()

    def _start(
        self,
        call: Callable[[], Result],
        timeout_s: float,
        what: str,
        path: str | None = None,
        keep: object = None,
    ) -> Callable[[], Result]:
        if os.getpid() != self._pid:
            raise StoreError(
                f"mooncake: {what}: this client was opened before a fork: open one here"
            )
        with self._lock:
            held = (list(self._registered.values()), keep)

        def holding() -> Result:
            # What is let go of meanwhile lives until this has returned.
            _ = held
            return call()

        return self._calls.start(holding, timeout_s, f"mooncake: {what}", path)


def check_machine(options: MooncakeOptions, role: Role) -> None:
    """Raise Refused for what this machine has not: an address, RDMA devices, or so much memory.

    Looks at the machine alone. Mooncake would take RDMA without a device, and use something else,
    and lend memory under an address at which nobody finds it.
    """
    if role == "writer":
        check_fits("global_segment_size", options.global_segment_size)
        if options.host:
            check_own("host", options.host)
    check_fits("local_buffer_size", options.local_buffer_size)
    if options.protocol != "rdma":
        return
    found = sorted(each.name for each in _RDMA_DEVICES.glob("*"))
    if not found:
        raise Refused("protocol=rdma: this machine has no RDMA device: use protocol=tcp")
    missing = [name for name in options.device_names if name not in found]
    if missing:
        raise Refused(
            f"device_names: no RDMA device {missing[0]!r} here; there are {', '.join(found)}"
        )


def _answers_or_is_gone(master: str, timeout_s: float = 2.0) -> bool:
    """Whether a call to the master would come back soon, one way or the other."""
    started = time.monotonic()
    try:
        probe_master(master, timeout_s)
    except StoreError:
        return time.monotonic() - started < timeout_s / 2
    return True
