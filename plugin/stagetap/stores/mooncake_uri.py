"""What a Mooncake address says: `mooncake://MASTER:PORT/RUN?protocol=tcp&...`. Pure.

One address serves every process of a run: the engine's workers, its scheduler side and the
trainers. Each takes from it what its role needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Literal
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import msgspec

from stagetap.errors import Refused
from stagetap.wording import plain, shown

SCHEME = "mooncake"
P2P_HANDSHAKE = "P2PHANDSHAKE"

_KIB, _MIB, _GIB, _TIB = (1024**power for power in (1, 2, 3, 4))

LEAST_LENT_BYTES = 16 * _MIB
"""Mooncake lends no smaller piece of memory."""

_SIZE_DIGITS = 19
_SIZE_UNITS = {"": 1, "B": 1, "KIB": _KIB, "MIB": _MIB, "GIB": _GIB, "TIB": _TIB}
_SIZE = re.compile(r"([0-9]+)\s*([A-Za-z]*)")
_TIME_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)")
_MOST_SECONDS = 10**9
_MOST_REPLICAS = 1024
_SWITCH = {"on": True, "off": False}
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")
_COPIES = re.compile(r"[0-9]{1,5}")
_PORT = re.compile(r"[0-9]{1,5}")
_NO_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")


class MooncakeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A Mooncake address, read and checked. Sizes are in bytes, times in seconds.

    Attributes:
        master: `host:port` of the mooncake_master.
        run: the run that the address names, if it names one.
        protocol: how bytes travel between hosts; all processes of a run must say the same.
        device_names: RDMA devices to use; empty lets Mooncake choose.
        metadata_server: where processes find each other: each other directly, or a server.
        host: the name or address at which others reach this process; empty means the one that it
            has towards the master.
        global_segment_size: memory that each *worker* lends to the store, in bytes; 0 when
            standalone clients host the segments. Readers and the scheduler side lend none.
        local_buffer_size: staging for objects that do not lie in registered memory (commits,
            errors, manifests), in bytes; a larger one cannot be stored or read.
        hard_pin: never evict what is stored: a full store refuses instead.
        soft_pin: seconds for which eviction takes other objects first; 0 pins nothing.
        replicas: copies of each object, on different segments.
        lease_wait: seconds for which a removal waits until readers' leases have ended.
        force_remove: remove although somebody may still be reading.
        space_wait: seconds for which a write waits for room.
        connect_timeout: seconds for the first answer of the master's port.
        setup_timeout: seconds for setting up the client after that.
        put_timeout: seconds for one write, waiting for room not counted.
        get_timeout: seconds for one read.
        rpc_timeout: seconds for one question to the master: exists, size, remove.
    """

    master: str
    run: str | None = None
    protocol: Literal["tcp", "rdma"] = "tcp"
    device_names: tuple[str, ...] = ()
    metadata_server: str = P2P_HANDSHAKE
    host: str = ""
    global_segment_size: int = _GIB
    local_buffer_size: int = 64 * _MIB
    hard_pin: bool = True
    soft_pin: float = 0.0
    replicas: int = 1
    lease_wait: float = 15.0
    force_remove: bool = False
    space_wait: float = 30.0
    connect_timeout: float = 5.0
    setup_timeout: float = 20.0
    put_timeout: float = 30.0
    get_timeout: float = 30.0
    rpc_timeout: float = 10.0


def is_mooncake(uri: str) -> bool:
    """Whether the address names a Mooncake store."""
    return uri.startswith(f"{SCHEME}://")


def parse_uri(uri: str) -> MooncakeOptions:
    """The options that an address carries, defaults filled in.

    Raises Refused, naming the option, when one is unknown, repeated, ill-typed or out of range, and
    when the address is no `mooncake://MASTER:PORT/RUN`.
    """
    if not is_mooncake(uri):
        raise Refused(f"{uri}: not a Mooncake address: write {SCHEME}://MASTER:PORT/RUN")
    # urllib would leave out line ends and tabs, and keep a lone '%' as it is.
    if any(char.isspace() or not char.isprintable() for char in uri):
        raise Refused(f"{uri!r}: a space or line end in an address: write %20 or leave it out")
    if _NO_ESCAPE.search(uri):
        raise Refused(f"{uri}: '%' begins an escape of two hexadecimal digits: write it as %25")
    try:
        parts = urlsplit(uri)
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
        run = unquote(parts.path.removeprefix("/"), errors="strict")
    except ValueError as error:
        raise Refused(f"{uri}: not a valid address: {error}") from None
    if parts.fragment or uri.endswith("#"):
        raise Refused(f"{uri}: '#' ends an address: write it as %23")
    values: dict[str, Any] = {"master": _master(uri, parts.netloc)}
    if run:
        if "/" in parts.path.removeprefix("/"):
            raise Refused(f"{uri}: one run, not a path: write a '/' in its name as %2F")
        values["run"] = run
    for name, text in pairs:
        if name not in _READERS:
            raise Refused(f"{uri}: unknown option {name!r}; known are {', '.join(_READERS)}")
        if name in values:
            raise Refused(f"{uri}: option {name} is given twice; keep one of them")
        try:
            values[name] = _READERS[name](text)
        except ValueError as error:
            raise Refused(f"{uri}: option {name}: {error}") from None
    options = MooncakeOptions(**values)
    _check_together(uri, options)
    return options


def format_uri(options: MooncakeOptions) -> str:
    """The address that `parse_uri` reads as these options; defaults are left out."""
    defaults = MooncakeOptions(master=options.master)
    said = {
        name: _text(getattr(options, name))
        for name in _READERS
        if getattr(options, name) != getattr(defaults, name)
    }
    path = f"/{quote(options.run, safe='')}" if options.run is not None else ""
    query = f"?{urlencode(said)}" if said else ""
    return f"{SCHEME}://{options.master}{path}{query}"


def with_run(options: MooncakeOptions, run_id: str) -> MooncakeOptions:
    """The same address for this run. Raises Refused when it names another one."""
    if options.run not in (None, run_id):
        raise Refused(
            f"the store address names run {options.run!r} and run_id is {run_id!r}: "
            "say it in one place"
        )
    return msgspec.structs.replace(options, run=run_id)


def _master(uri: str, netloc: str) -> str:
    host, colon, port = netloc.rpartition(":")
    if not colon or not _HOST.fullmatch(host):
        raise Refused(f"{uri}: the master needs a host and a port: {SCHEME}://MASTER:PORT/RUN")
    if not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise Refused(f"{uri}: port {shown(port)}: give a number from 1 to 65535")
    return f"{host}:{int(port)}"


def _check_together(uri: str, options: MooncakeOptions) -> None:
    if options.device_names and options.protocol != "rdma":
        raise Refused(f"{uri}: option device_names needs protocol=rdma")
    if options.hard_pin and options.soft_pin:
        raise Refused(f"{uri}: option soft_pin needs hard_pin=off: what is pinned hard stays")


def parse_size(text: str) -> int:
    """Bytes that `4096`, `512MiB` or `4GiB` stand for. Raises ValueError."""
    found = _SIZE.fullmatch(text)
    unit = found.group(2).upper() if found else ""
    if not found or unit not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is no size: write bytes, or 512MiB, 4GiB")
    digits = found.group(1).lstrip("0") or "0"
    # Python reads no number of thousands of digits.
    if len(digits) > _SIZE_DIGITS or (size := int(digits) * _SIZE_UNITS[unit]) >= 2**63:
        raise ValueError(f"{shown(text)} is out of range: no machine has as much")
    return size


def parse_seconds(text: str) -> float:
    """Seconds that `30`, `500ms`, `30s`, `30min` or `2h` stand for. Raises ValueError."""
    found = _TIME.fullmatch(text)
    if not found or found.group(2) not in _TIME_UNITS:
        raise ValueError(f"{text!r} is no time: write seconds, or 500ms, 30s, 30min")
    seconds = float(found.group(1)) * _TIME_UNITS[found.group(2)]
    if seconds > _MOST_SECONDS:
        raise ValueError(f"{shown(text)} is out of range: give at most {_MOST_SECONDS}s")
    return seconds


def parse_lent(text: str) -> int:
    """Bytes to lend: as `parse_size`, and 0 or as much as Mooncake lends at least."""
    size = parse_size(text)
    if 0 < size < LEAST_LENT_BYTES:
        raise ValueError(
            f"{text} is out of range: Mooncake lends {_text(LEAST_LENT_BYTES)} at least: give more"
        )
    return size


def host_and_port(host: str, port: int) -> str:
    """An address as URLs and Mooncake write it: that of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _staging(text: str) -> int:
    size = parse_size(text)
    if size < _MIB:
        raise ValueError(f"{text} is out of range: give at least {_text(_MIB)}")
    return size


def _some_seconds(text: str) -> float:
    seconds = parse_seconds(text)
    if not seconds:
        raise ValueError("a timeout of nothing: give more than 0 seconds")
    return seconds


def _switch(text: str) -> bool:
    if text not in _SWITCH:
        raise ValueError(f"{text!r}: write on or off")
    return _SWITCH[text]


def _copies(text: str) -> int:
    found = _COPIES.fullmatch(text)
    if not found or not 0 < int(text) <= _MOST_REPLICAS:
        raise ValueError(f"{shown(text)}: give a number from 1 to {_MOST_REPLICAS}")
    return int(text)


def _protocol(text: str) -> str:
    if text not in ("tcp", "rdma"):
        raise ValueError(f"{text!r}: write tcp or rdma")
    return text


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not all(names):
        raise ValueError(f"{text!r}: write device names with commas between them")
    return names


def _word(text: str) -> str:
    if not text or any(char.isspace() or not char.isprintable() for char in text):
        raise ValueError(f"{text!r}: give a name")
    return text


def _text(value: Any) -> str:
    """A value as an address writes it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return ",".join(value)
    if isinstance(value, float):
        return plain(value)
    if isinstance(value, int):
        for unit, size in (("GiB", _GIB), ("MiB", _MIB), ("KiB", _KIB)):
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
    return str(value)


_READERS = MappingProxyType[str, Callable[[str], Any]](
    {
        "protocol": _protocol,
        "device_names": _names,
        "metadata_server": _word,
        "host": _word,
        "global_segment_size": parse_lent,
        "local_buffer_size": _staging,
        "hard_pin": _switch,
        "soft_pin": parse_seconds,
        "replicas": _copies,
        "lease_wait": parse_seconds,
        "force_remove": _switch,
        "space_wait": parse_seconds,
        "connect_timeout": _some_seconds,
        "setup_timeout": _some_seconds,
        "put_timeout": _some_seconds,
        "get_timeout": _some_seconds,
        "rpc_timeout": _some_seconds,
    }
)
