"""Who listens at a master's address, found out within a bound."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from stagetap.errors import StoreError
from stagetap.stores.mooncake_probe import probe_master

MASTERS_ANSWER = bytes([0x15, 0, 11, 0]) + bytes(12)


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that does this with the first connection once it was asked; its address.

    The question is read first, as a server does: closing a connection with something unread in it
    resets it, and what was sent before may be lost with it.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):  # Who asked may have gone.
                connection.recv(100)
                serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(2)


def refused(address: str, timeout_s: float = 1.0) -> str:
    """The message; that it came within the bound is checked."""
    started = time.monotonic()
    with pytest.raises(StoreError) as error:
        probe_master(address, timeout_s)
    assert time.monotonic() - started < timeout_s + 1
    assert error.value.path == address
    assert address in str(error.value)
    assert "stagetap store up" in str(error.value)
    return str(error.value)


def test_a_master_that_answers_tells_which_address_we_have() -> None:
    with listening(lambda connection: connection.sendall(MASTERS_ANSWER)) as address:
        assert probe_master(address, 1.0) == "127.0.0.1"


def test_an_answer_in_pieces_is_one() -> None:
    def serve(connection: socket.socket) -> None:
        for byte in MASTERS_ANSWER:
            connection.sendall(bytes([byte]))

    with listening(serve) as address:
        probe_master(address, 1.0)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "refused" in refused(f"127.0.0.1:{port}").lower()


def test_one_that_accepts_and_says_nothing() -> None:
    with listening(lambda connection: time.sleep(1.5)) as address:
        assert "no answer in time" in refused(address, 0.5)


def test_one_that_drips_does_not_stretch_the_bound() -> None:
    def serve(connection: socket.socket) -> None:
        for _ in range(10):
            connection.sendall(b"\x15")
            time.sleep(0.2)

    with listening(serve) as address:
        assert "no answer in time" in refused(address, 0.5)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x15\x00"])
def test_another_server(answer: bytes) -> None:
    with listening(lambda connection: connection.sendall(answer)) as address:
        assert "no Mooncake master" in refused(address)


def test_a_name_that_nobody_has() -> None:
    refused("nobody.invalid:50051")


def test_looking_up_a_name_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object) -> None:
        time.sleep(2)
        raise OSError

    monkeypatch.setattr(socket, "create_connection", look_up)
    assert "no answer within" in refused("slow.invalid:1", 0.2)
