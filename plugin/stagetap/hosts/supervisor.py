"""One host's part of an engine, and what becomes of it when another host's part ends.

vLLM's followers wait for ever for a leader that is gone, and its leader for a follower. So each
host's server is a child of a process that knows of the others: the followers' connect to the
leader's, and a server that ends, or is not heard of any more, takes all others along.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from stagetap.engine.refusal import FRONT_END_ENV
from stagetap.errors import Refused, StageTapError
from stagetap.hosts.link import (
    BEAT_SECONDS,
    Beat,
    Ended,
    Hello,
    Link,
    LinkLost,
    TurnedAway,
    Word,
)
from stagetap.processes import adopt_orphans, descendants, end_with_parent

_MEETING_SECONDS = 600.0
_END_SECONDS = 15.0
_CONNECT_SECONDS = 1.0


@dataclass(frozen=True)
class Hosts:
    """How this host takes part.

    Attributes:
        count: of all hosts.
        rank: of this one; 0 leads.
        leader: address of host 0.
        port: where host 0 listens for the others.
    """

    count: int
    rank: int
    leader: str
    port: int


class HostLost(StageTapError):
    """The engine ended because of another host."""


def supervise(command: Sequence[str], environment: Mapping[str, str], hosts: Hosts) -> int:
    """Run one host's server until it ends or another host's does; its exit code.

    Raises:
        HostLost: another host's server ended, or could not be met.
        Refused: host 0 cannot listen, or does not want this one.
    """
    with ExitStack() as opened:
        others: _Followers | _Leader
        if hosts.rank == 0:
            others = _Followers(hosts, opened.enter_context(_listening(hosts)))
        else:
            others = _Leader(hosts)
        signals = opened.enter_context(_noted_signals())
        server = _Server(command, environment)
        opened.callback(os.close, server.pidfd)
        opened.callback(server.end)
        return _watch(server, others, signals)


def _watch(server: _Server, others: _Followers | _Leader, signals: int) -> int:
    asked_to_stop = False
    with selectors.DefaultSelector() as selector:
        selector.register(server.pidfd, selectors.EVENT_READ)
        selector.register(signals, selectors.EVENT_READ)
        beat_at = time.monotonic()
        while True:
            others.register(selector)
            ready = {key.fd for key, _ in selector.select(BEAT_SECONDS / 2)}
            if server.pidfd in ready:
                code = server.exit_code()
                others.tell(
                    Ended(
                        why="was stopped" if asked_to_stop else f"ended with exit code {code}",
                        stopped=asked_to_stop,
                    )
                )
                # By itself it ends over a trouble: vLLM's headless one says 0 all the same.
                return code or int(not asked_to_stop)
            if signals in ready:
                os.read(signals, 64)
                if asked_to_stop:
                    server.end(at_once=True)
                else:
                    # The others are needed until what is in flight has ended.
                    asked_to_stop = True
                    server.stop()
            try:
                others.hear(ready)
                if time.monotonic() >= beat_at:
                    others.beat()
                    beat_at = time.monotonic() + BEAT_SECONDS
            except _Stopped as stopped:
                print(f"stagetap: {stopped}: this host's server ends", file=sys.stderr)
                server.end()
                return 0
            except HostLost as lost:
                others.tell(Ended(why=f"ended, as {lost}", stopped=False))
                server.end()
                print(file=sys.stderr)  # a server that is killed may leave half a line
                raise HostLost(
                    f"{lost}: this host's server was ended; start the engine again on all hosts"
                ) from None


class _Stopped(Exception):
    """The leader was asked to stop."""


class _Followers:
    """What the leader knows of the others."""

    def __init__(self, hosts: Hosts, listener: socket.socket) -> None:
        self._hosts = hosts
        self._listener = listener
        self._links: list[Link] = []
        self._meeting_ends = time.monotonic() + _MEETING_SECONDS

    def register(self, selector: selectors.BaseSelector) -> None:
        """Everything that may have something to say."""
        _register(selector, [self._listener, *self._links])

    def hear(self, ready: set[int]) -> None:
        """Let in who comes, and hear the others. Raises HostLost."""
        if self._listener.fileno() in ready:
            with suppress(OSError):
                connection, place = self._listener.accept()
                self._links.append(Link(connection, place[0]))
        for link in list(self._links):
            try:
                for word in link.hear() if link.fileno() in ready else ():
                    self._take(link, word)
                link.check_silence()
            except LinkLost as lost:
                self._drop(link)
                if link.rank is not None:
                    raise HostLost(f"host {link.rank} ({link.address}) is gone: {lost}") from None

    def beat(self) -> None:
        """Tell all that this host is well. Raises HostLost when one has not come."""
        for link in self._links:
            if link.rank is not None:
                link.say(Beat())
        missing = set(range(1, self._hosts.count)) - {link.rank for link in self._links}
        if missing and time.monotonic() > self._meeting_ends:
            raise HostLost(
                f"host {min(missing)} has not come within {_MEETING_SECONDS:g} s: start "
                f"`stagetap serve` there with --node-rank {min(missing)}, and let it reach "
                f"{self._hosts.leader}:{self._hosts.port}"
            )

    def tell(self, word: Word) -> None:
        """The last word to all."""
        for link in self._links:
            link.say_last(word)
        self._links.clear()

    def _take(self, link: Link, word: Word) -> None:
        if isinstance(word, Ended) and link.rank is not None:
            raise HostLost(f"the server of host {link.rank} ({link.address}) {word.why}")
        if isinstance(word, Hello):
            why = self._why_not(word)
            if why is None:
                link.rank = word.rank
                print(f"stagetap: host {link.rank} ({link.address}) is here", file=sys.stderr)
            else:
                link.say_last(TurnedAway(why=why))
                self._links.remove(link)

    def _why_not(self, hello: Hello) -> str | None:
        if hello.hosts != self._hosts.count:
            return f"--nnodes {hello.hosts} here, {self._hosts.count} on host 0: give all the same"
        if not 0 < hello.rank < self._hosts.count:
            return f"--node-rank {hello.rank} is none of {self._hosts.count} hosts"
        if hello.rank in {link.rank for link in self._links}:
            return f"--node-rank {hello.rank} is another host's: give each its own"
        return None

    def _drop(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)
        link.close()


class _Leader:
    """What a follower knows of the leader."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._name = f"host 0 ({hosts.leader})"
        self._link: Link | None = None
        self._meeting_ends = time.monotonic() + _MEETING_SECONDS

    def register(self, selector: selectors.BaseSelector) -> None:
        """The connection, once there is one."""
        _register(selector, [] if self._link is None else [self._link])

    def hear(self, ready: set[int]) -> None:
        """What the leader says. Raises HostLost, _Stopped, Refused."""
        if self._link is None:
            return
        try:
            for word in self._link.hear() if self._link.fileno() in ready else ():
                if isinstance(word, TurnedAway):
                    raise Refused(word.why)
                if isinstance(word, Ended):
                    said = f"the server of {self._name} {word.why}"
                    raise _Stopped(said) if word.stopped else HostLost(said)
            self._link.check_silence()
        except LinkLost as lost:
            raise HostLost(f"{self._name} is gone: {lost}") from None

    def beat(self) -> None:
        """Tell the leader that this host is well; meet it first. Raises HostLost."""
        if self._link is not None:
            self._link.say(Beat())
            return
        place = (self._hosts.leader, self._hosts.port)
        with suppress(OSError):
            connection = socket.create_connection(place, _CONNECT_SECONDS)
            self._link = Link(connection, self._hosts.leader)
            self._link.say(Hello(rank=self._hosts.rank, hosts=self._hosts.count))
            return
        if time.monotonic() > self._meeting_ends:
            raise HostLost(
                f"host 0 was not met at {place[0]}:{place[1]} within {_MEETING_SECONDS:g} s: start "
                "`stagetap serve` there with --node-rank 0"
            )

    def tell(self, word: Word) -> None:
        """The last word."""
        if self._link is not None:
            self._link.say_last(word)
            self._link = None


class _Server:
    """The server as a child, ended with this process however that ends."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        adopt_orphans()  # its engine must be found when it is killed
        # A refusal inside ends the front end alone, which knows itself by its pid.
        named = ("/bin/sh", "-c", f'export {FRONT_END_ENV}=$$; exec "$@"', "sh", *command)
        self._child = subprocess.Popen(
            named,
            env=environment,
            start_new_session=True,  # Ctrl-C is for us; we stop it.
            preexec_fn=end_with_parent,
        )
        self.pidfd = os.pidfd_open(self._child.pid)

    def stop(self) -> None:
        """Ask it to end what is in flight, and itself."""
        with suppress(ProcessLookupError):
            self._child.terminate()

    def exit_code(self) -> int:
        """Of one that has ended, as a shell would say it."""
        code = self._child.wait()
        return code if code >= 0 else 128 - code

    def end(self, at_once: bool = False) -> None:
        """End it and all below it, whatever they wait for."""
        if not at_once and self._child.poll() is None:
            self.stop()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_END_SECONDS)
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait()


def _register(selector: selectors.BaseSelector, wanted: Sequence[socket.socket | Link]) -> None:
    """Make the selector look at these, beside what it was given by number."""
    known = [key.fileobj for key in selector.get_map().values() if not isinstance(key.fileobj, int)]
    for each in known:
        if each not in wanted:
            selector.unregister(each)
    for each in wanted:
        if each not in known:
            selector.register(each, selectors.EVENT_READ)


@contextmanager
def _listening(hosts: Hosts) -> Iterator[socket.socket]:
    try:
        (family, _, _, _, place), *_ = socket.getaddrinfo(
            hosts.leader, hosts.port, type=socket.SOCK_STREAM
        )
        listener = socket.create_server(place[:2], family=family)
    except OSError as error:
        raise Refused(
            f"host 0 cannot listen on {hosts.leader}:{hosts.port} ({error.strerror}): give one of "
            "its own addresses as --master-addr, and a free port as --watch-port"
        ) from None
    with listener:
        listener.setblocking(False)
        yield listener


@contextmanager
def _noted_signals() -> Iterator[int]:
    """SIGINT and SIGTERM as bytes to read, wherever the main thread is."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)
