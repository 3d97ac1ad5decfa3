"""What supervisors say to each other, over a real socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from stagetap.hosts import link
from stagetap.hosts.link import Beat, Ended, Hello, Link, LinkLost, Word

Pair = tuple[Link, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A link, and the other end of its connection."""
    ours, theirs = socket.socketpair()
    with theirs:
        made = Link(ours, "there")
        yield made, theirs
        made.close()


def test_words_arrive_whole_however_they_are_cut(pair: Pair) -> None:
    link, theirs = pair
    other = Link(theirs.dup(), "here")
    said: list[Word] = [Hello(rank=1, hosts=2), Beat(), Ended(why="was stopped", stopped=True)]
    for word in said:
        other.say(word)
    other.close()
    data = theirs_bytes(link)
    heard: list[Word] = []
    for start in range(0, len(data), 7):
        theirs.send(data[start : start + 7])
        heard += link.hear()
    assert heard == said
    assert link.hear() == []


def theirs_bytes(link: Link) -> bytes:
    """What has been sent to a link."""
    return link._connection.recv(10_000)


def test_a_connection_that_ends_and_foreign_bytes_are_told(pair: Pair) -> None:
    link, theirs = pair
    theirs.send(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(LinkLost, match="does not speak as"):
        link.hear()
    theirs.close()
    with pytest.raises(LinkLost, match="ended without a word"):
        link.hear()


def test_a_line_without_an_end_is_not_collected_for_ever(pair: Pair) -> None:
    link, theirs = pair
    theirs.send(b"x" * 60_000)
    assert link.hear() == []
    theirs.send(b"x" * 60_000)
    with pytest.raises(LinkLost, match="does not speak as"):
        link.hear()


def test_silence_is_told(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair
    ours.check_silence()
    monkeypatch.setattr(link, "SILENCE_SECONDS", 0.0)
    with pytest.raises(LinkLost, match="nothing was heard of it for 0 s"):
        ours.check_silence()


def test_the_last_word_arrives_before_the_end(pair: Pair) -> None:
    ours, theirs = pair
    ours.say_last(Ended(why="was stopped", stopped=True))
    other = Link(theirs.dup(), "here")
    assert other.hear() == [Ended(why="was stopped", stopped=True)]
    with pytest.raises(LinkLost):
        other.hear()
    other.close()
