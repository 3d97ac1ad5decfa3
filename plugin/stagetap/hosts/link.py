"""What two hosts say to each other: lines of JSON over TCP, at least one a second."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import msgspec

BEAT_SECONDS = 1.0
SILENCE_SECONDS = 30.0
"""After so long without a word the other host is taken for lost. A shorter cut is ridden out."""

_LONGEST = 64 * 1024
_LAST_WORD_SECONDS = 2.0


class Hello(msgspec.Struct, tag="hello"):
    """A follower's first word."""

    rank: int
    hosts: int


class TurnedAway(msgspec.Struct, tag="turned away"):
    """The leader's answer to a follower that does not belong here."""

    why: str


class Beat(msgspec.Struct, tag="beat"):
    """All is well."""


class Ended(msgspec.Struct, tag="ended"):
    """The engine ends, by this host's decision or accident; `stopped`: somebody asked for it."""

    why: str
    stopped: bool


Word = Hello | TurnedAway | Beat | Ended

_decoder = msgspec.json.Decoder(Word)


class LinkLost(Exception):
    """Nothing more will come; the message says why."""


class Link:
    """One connection to another host. Nothing here waits but `say_last`."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        """`address` is the other host's."""
        connection.setblocking(False)
        self.address = address
        self.rank: int | None = None
        self._connection = connection
        self._received = b""
        self._heard = time.monotonic()

    def fileno(self) -> int:
        """For a selector."""
        return self._connection.fileno()

    def hear(self) -> list[Word]:
        """What has arrived. Raises LinkLost at the end of the connection, or for foreign bytes."""
        try:
            data = self._connection.recv(_LONGEST)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LinkLost(f"its connection broke ({error.strerror})") from None
        if not data:
            raise LinkLost("its `stagetap serve` ended without a word")
        self._heard = time.monotonic()
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > _LONGEST:
            raise LinkLost("it does not speak as `stagetap serve` does")
        try:
            return [_decoder.decode(line) for line in lines]
        except msgspec.DecodeError:
            raise LinkLost("it does not speak as `stagetap serve` does") from None

    def check_silence(self) -> None:
        """Raises LinkLost when nothing was heard for too long."""
        if time.monotonic() - self._heard > SILENCE_SECONDS:
            raise LinkLost(f"nothing was heard of it for {SILENCE_SECONDS:g} s")

    def say(self, word: Word) -> None:
        """Send, unless the other side takes nothing: then its silence will tell."""
        with suppress(OSError):
            self._connection.send(_line(word))

    def say_last(self, word: Word) -> None:
        """Send for certain, if that can be done at all, and close."""
        with suppress(OSError):
            self._connection.settimeout(_LAST_WORD_SECONDS)
            self._connection.sendall(_line(word))
        self._connection.close()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def _line(word: Word) -> bytes:
    return msgspec.json.encode(word) + b"\n"
