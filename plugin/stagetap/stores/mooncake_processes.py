"""Mooncake's own programs as children of this process: a master, and hosts of memory."""

from __future__ import annotations

import os
import re
import signal
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
from stagetap.stores.mooncake_package import family_environment, find_program
from stagetap.stores.mooncake_probe import probe_master
from stagetap.stores.mooncake_uri import MooncakeOptions, host_and_port

_START_SECONDS = 20.0
_END_SECONDS = 5.0
_TRIES = 5

_GLOG_LINE = re.compile(r"([IWEF])\d{4} \d\d:\d\d:\d\d")
_SAID_ALWAYS = (
    "WARNING: Logging before InitGoogleLogging()",
    "Local segment descriptor not found",
    "*** Check failure stack trace: ***",
)
_SENT_BY_OTHERS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


class Process:
    """One program, ended with this process however that ends."""

    def __init__(self, name: str, command: Sequence[str], host: str, log: Path | None) -> None:
        """Start it. What it writes goes to the end of `log`, or to a file that is removed.

        `host` is the address that it listens on.
        """
        self.name = name
        with naming("write", str(log or tempfile.gettempdir())):
            self._log = log.open("ab+") if log else tempfile.TemporaryFile()  # noqa: SIM115
            self._log_start = self._log.seek(0, os.SEEK_END)  # what is before is of earlier ones
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            # Warnings and worse; the rest is a line of figures every few seconds.
            env={
                "GLOG_minloglevel": "1",
                "MC_LOG_LEVEL": "WARNING",
                **family_environment(host),
                **os.environ,
            },
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
        """How it ended, and why if it said that."""
        code = self._child.poll()
        if code is None:
            return "it still runs"
        self._log.seek(self._log_start)
        return end_in_words(code, self._log.read().decode(errors="replace"))

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
    metrics: str
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
        host = host.strip("[]")
        for tries_left in reversed(range(_TRIES)):
            # Another master on this port would answer, and be taken for ours.
            rpc_port = free_port(host, port)
            self.address = host_and_port(host, rpc_port)
            self.metrics_port = free_port(host)
            self.metrics = f"http://{host_and_port(host, self.metrics_port)}/metrics"
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
                host,
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
        host = host.strip("[]")
        command = [
            find_program("mooncake_client"),
            *lending_arguments(store, size_bytes, host, free_port(host)),
        ]
        super().__init__("mooncake_client", command, host, log)


def end_in_words(code: int, log: str) -> str:
    """How a program ended, and the line of its log that says why, if one does. Pure.

    Args:
        code: its exit code, or below 0 the signal that ended it.
        log: what it wrote.
    """
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if -code in _SENT_BY_OTHERS:
        return how  # of that its log says nothing
    lines = [line for line in log.splitlines() if line.strip()]
    fatal = [line for line in lines if _severity(line) == "F"]
    told = [
        line
        for line in lines
        if _severity(line) not in ("I", "W") and not any(said in line for said in _SAID_ALWAYS)
    ]
    last = (fatal or told)[-1:]
    return ": ".join([how, *last])


def _severity(line: str) -> str | None:
    """I, W, E or F; None for what Mooncake's log did not write."""
    found = _GLOG_LINE.match(line)
    return found.group(1) if found else None


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
            where = host_and_port(host.strip("[]"), port)
            raise StoreError(
                f"cannot listen on {where}: {error.strerror}: give another port, or an address of "
                "this machine"
            ) from None
        return int(probe.getsockname()[1])
