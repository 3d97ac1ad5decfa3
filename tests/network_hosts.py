"""Hosts of their own on one machine: network namespaces whose links meet at a bridge."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """One of them.

    Attributes:
        namespace: its name for ``ip netns``.
        address: its IPv4 address.
    """

    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """The same, to be run there."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Threads of this process whose sockets are there."""
        return ThreadPoolExecutor(count, initializer=self._enter)

    def _enter(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        descriptor = os.open(f"/run/netns/{self.namespace}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(descriptor)


class Network:
    """Hosts that reach each other, and links that can be cut."""

    def __init__(self, hosts: dict[str, Host], switch: str) -> None:
        self._hosts = hosts
        self._switch = switch

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """A host that nobody reaches, as with its cable pulled."""
        _ip("-n", self._switch, "link", "set", f"to-{name}", "down")
        try:
            yield
        finally:
            _ip("-n", self._switch, "link", "set", f"to-{name}", "up")


@contextmanager
def network(names: Sequence[str]) -> Iterator[Network]:
    """So many hosts. Skips where none can be made, with the cure as the reason."""
    if os.geteuid() != 0:
        pytest.skip(f"network namespaces need root, this is uid {os.geteuid()}")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need ip: apt-get install iproute2")
    prefix = f"stagetap-{os.getpid()}"
    switch = f"{prefix}-switch"
    hosts = {
        name: Host(f"{prefix}-{name}", f"10.77.0.{number}") for number, name in enumerate(names, 1)
    }
    made: list[str] = []
    try:
        try:
            for namespace in (switch, *(host.namespace for host in hosts.values())):
                _ip("netns", "add", namespace)
                made.append(namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            for name, host in hosts.items():
                port = ("peer", "name", f"to-{name}", "netns", switch)
                _ip("link", "add", "eth0", "netns", host.namespace, "type", "veth", *port)
                _ip("-n", switch, "link", "set", f"to-{name}", "master", "bridge", "up")
                _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
                _ip("-n", host.namespace, "link", "set", "eth0", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine makes no network namespaces: {error.stderr.strip()}")
        yield Network(hosts, switch)
    finally:
        for namespace in made:
            _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
