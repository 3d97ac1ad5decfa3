"""Is there a Mooncake master at this address, and is it alive? Answered within seconds.

Mooncake's own client would try for minutes, and hold up the whole process meanwhile. A connection
that is accepted proves nothing: the kernel does that for a process that hangs. So the master is
asked something, in the framing of its RPC library (coro_rpc): a call of a function that does not
exist, which it answers by saying so.
"""

from __future__ import annotations

import socket
import struct
import threading
import time

from stagetap.errors import StoreError

_MAGIC = 0x15
_REQUEST = struct.Struct("<BBBBIIII")  # magic, version, format, type, sequence, function, sizes
_RESPONSE_BYTES = 16
_NO_SUCH_FUNCTION = 0
_CURE = "start one with `stagetap store up`, or correct the address"


def probe_master(address: str, timeout_s: float) -> str:
    """The address of this host that packets to the master leave from.

    Raises StoreError, naming the master's address, when nothing answers within `timeout_s`, or
    something that is no Mooncake master.
    """
    outcome: list[str | StoreError] = []

    def ask() -> None:
        try:
            outcome.append(_ask(address, time.monotonic() + timeout_s))
        except StoreError as error:
            outcome.append(error)

    # Looking up a name has no bound of its own.
    thread = threading.Thread(target=ask, name="stagetap-mooncake-probe", daemon=True)
    thread.start()
    thread.join(timeout_s + 0.5)
    if not outcome:
        raise _silent(address, f"no answer within {timeout_s:g} s")
    if isinstance(outcome[0], StoreError):
        raise outcome[0]
    return outcome[0]


def _ask(address: str, deadline: float) -> str:
    host, _, port = address.rpartition(":")
    try:
        left = max(0.1, deadline - time.monotonic())
        with socket.create_connection((host.strip("[]"), int(port)), left) as connection:
            connection.sendall(_REQUEST.pack(_MAGIC, 0, 0, 0, 1, _NO_SUCH_FUNCTION, 0, 0))
            answer = b""
            while len(answer) < _RESPONSE_BYTES:
                connection.settimeout(max(0.1, deadline - time.monotonic()))
                received = connection.recv(_RESPONSE_BYTES)
                if not received:
                    break
                answer += received
            local = str(connection.getsockname()[0])
    except TimeoutError:
        raise _silent(
            address, "no answer in time: it hangs, is cut off, or is no Mooncake master"
        ) from None
    except OSError as error:
        raise _silent(address, error.strerror or str(error)) from None
    if len(answer) < _RESPONSE_BYTES or answer[0] != _MAGIC:
        raise _silent(address, "what listens there is no Mooncake master")
    return local


def _silent(address: str, reason: str) -> StoreError:
    return StoreError(f"mooncake master {address}: {reason}: {_CURE}", path=address)
