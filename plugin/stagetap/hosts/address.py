"""Which of this host's addresses the others use, and the interface that has it."""

from __future__ import annotations

import fcntl
import socket
import struct

from stagetap.errors import Refused

_SIOCGIFADDR = 0x8915


def address_towards(leader: str) -> str:
    """This host's address on the way to the leader. Raises Refused when there is none."""
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(leader, 9, type=socket.SOCK_DGRAM)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Refused(
            f"--master-addr {leader} is out of reach ({error.strerror}): give the address of the "
            "host with --node-rank 0"
        ) from None


def check_own(option: str, host: str) -> None:
    """Raise Refused, naming the option, unless this is an address of this host, or a name of it."""
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(host.strip("[]"), 0)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(place)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Refused(
            f"option {option}: {host} is no address of this host ({reason}), so that others would "
            "not reach it: leave it out, or give one that `ip address` shows"
        ) from None


def interface_of(address: str) -> str | None:
    """The name of the interface that has an IPv4 address; None when no one has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
