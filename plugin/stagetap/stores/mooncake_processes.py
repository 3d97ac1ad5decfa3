"""Mooncake's own programs as children of this process: a master, and hosts of memory."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from stagetap.errors import StoreError
from stagetap.processes import end_with_parent
from stagetap.stores.file_io import naming
from stagetap.stores.mooncake_package import find_program
from stagetap.stores.mooncake_probe import probe_master
from stagetap.stores.mooncake_uri import MooncakeOptions

_START_SECONDS = 20.0
_END_SECONDS = 5.0
_TRIES = 5


class Process:
    """One program, ended with this process however that ends."""

    def __init__(self, name: str, command: Sequence[str], log: Path | None) -> None:
        """Start it. What it writes goes to the end of `log`, or to a file that is removed."""
        self.name = name
        with naming("write", str(log or tempfile.gettempdir())):
            self._log = log.open("ab+") if log else tempfile.TemporaryFile()  # noqa: SIM115
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Warnings and worse; the rest is a line of figures every few seconds.
            env={"GLOG_minloglevel": "1", "MC_LOG_LEVEL": "WARNING", **os.environ},
            start_new_session=True,  # Ctrl-C is for us; we end it.
            preexec_fn=end_with_parent,
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._child.poll() is not None

    def last_words(self) -> str:
        """How it ended, and the last line that it wrote."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        how = f"exit code {self._child.poll()}"
        return f"{how}: {lines[-1]}" if lines else how

    def end(self) -> None:
        """End it, and wait until it has ended. Twice is no error."""
        if not self.has_ended():
            self._child.terminate()
            try:
                self._child.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()


class Master(Process):
    """A mooncake_master that answers at `address`."""

    address: str
    metrics_port: int

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        lease_ms: int | None = None,
        log: Path | None = None,
    ) -> None:
        """Start one and wait for its first answer; port 0 takes a free one.

        `lease_ms` is how long an object that was read or asked for cannot be removed. Raises
        Refused without the program, StoreError when it does not start.
        """
        program = find_program("mooncake_master")
        for tries_left in reversed(range(_TRIES)):
            # Another master on this port would answer, and be taken for ours.
            rpc_port = free_port(host, port)
            self.address = f"{host}:{rpc_port}"
            self.metrics_port = free_port(host)
            super().__init__(
                "mooncake_master",
                [
                    program,
                    f"-rpc_address={host}",
                    f"-rpc_port={rpc_port}",
                    f"-metrics_host={host}",
                    f"-metrics_port={self.metrics_port}",
                    *([] if lease_ms is None else [f"-default_kv_lease_ttl={lease_ms}"]),
                ],
                log,
            )
            try:
                self._wait_for_answer()
            except StoreError:
                self.end()
                # A port that was free is another's by now.
                if port or not tries_left:
                    raise
            else:
                return

    def _wait_for_answer(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                probe_master(self.address, 1.0)
            except StoreError:
                if time.monotonic() > deadline:
                    raise
            else:
                return
            if self.has_ended():
                raise StoreError(f"mooncake_master on {self.address}: {self.last_words()}")
            time.sleep(0.05)


class MemoryHost(Process):
    """A mooncake_client that lends memory to a store, and does nothing else."""

    def __init__(
        self,
        master: str,
        size_bytes: int,
        host: str = "127.0.0.1",
        protocol: Literal["tcp", "rdma"] = "tcp",
        log: Path | None = None,
    ) -> None:
        """Start one; it lends its memory a moment later. Raises Refused, StoreError."""
        store = MooncakeOptions(master=master, protocol=protocol)
        arguments = lending_arguments(store, size_bytes, host, free_port(host))
        super().__init__("mooncake_client", [find_program("mooncake_client"), *arguments], log)


def lending_arguments(store: MooncakeOptions, size_bytes: int, host: str, port: int) -> list[str]:
    """What makes a mooncake_client lend memory to a store, and do nothing else."""
    devices = [f"-device_names={','.join(store.device_names)}"] if store.device_names else []
    return [
        f"-master_server_address={store.master}",
        f"-host={host}",
        f"-port={port}",
        f"-protocol={store.protocol}",
        *devices,
        f"-metadata_server={store.metadata_server}",
        f"-global_segment_size={size_bytes}",
    ]


def free_port(host: str, port: int = 0) -> int:
    """A port of this host that nobody listens on now: this one, or any. Raises StoreError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # What is left of connections to an earlier server is no server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise StoreError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        return int(probe.getsockname()[1])
