"""Masters that are gone, hang and come back: prompt named errors, and no restart of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from stagetap.errors import StoreError
from stagetap.stores.mooncake_calls import CallTimeout
from stagetap.stores.mooncake_client import MooncakeClient, open_client
from stagetap.stores.mooncake_objects import Placed
from stagetap.stores.mooncake_processes import Master, MemoryHost, Process, free_port
from stagetap.stores.mooncake_status import MasterUnreachable
from stagetap.stores.mooncake_uri import parse_uri

OpenClient = Callable[..., MooncakeClient]

HASTY = (
    "global_segment_size=32MiB&local_buffer_size=4MiB"
    "&connect_timeout=1&rpc_timeout=500ms&put_timeout=1&get_timeout=1"
)


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """Hung for as long as the context lasts."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is done takes no longer."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def kill(master: Master) -> None:
    os.kill(master.pid, signal.SIGKILL)
    while not master.has_ended():
        time.sleep(0.01)


def port_of(master: Master) -> int:
    return int(master.address.rpartition(":")[2])


def until_it_works(operation: Callable[[], object], seconds: float) -> float:
    """Seconds until an operation raises no StoreError any more."""
    started = time.monotonic()
    while True:
        try:
            operation()
        except StoreError:
            assert time.monotonic() - started < seconds
            time.sleep(0.05)
        else:
            return time.monotonic() - started


def test_no_master_at_start(mooncake: None) -> None:
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    with within(5), pytest.raises(StoreError, match=f"{address}: Connection refused: start one"):
        open_client(parse_uri(f"mooncake://{address}/run"), "writer")


def test_a_wrong_port_at_start(own_master: Master, connect: OpenClient) -> None:
    """The port of the metrics: somebody listens there."""
    own_master.address = f"127.0.0.1:{own_master.metrics_port}"
    with within(5), pytest.raises(StoreError, match="no Mooncake master"):
        connect(own_master, "reader", HASTY)


def test_a_master_that_hangs_at_start(own_master: Master, connect: OpenClient) -> None:
    with stopped(own_master), within(5), pytest.raises(StoreError, match="it hangs, is cut off"):
        connect(own_master, "reader", HASTY)


def test_a_master_that_hangs_later_is_reported_in_time(
    own_master: Master, connect: OpenClient
) -> None:
    client = connect(own_master, "writer", HASTY)
    memory = np.ones(4096, np.uint8)
    client.register(memory.ctypes.data, memory.nbytes, memory)
    client.put("k", b"x")
    with stopped(own_master):
        timeouts = []
        for operation in (
            lambda: client.put("a", b"x"),
            lambda: client.put_from([Placed("b", ((memory.ctypes.data, 100),))]),
            lambda: client.get("k"),
            lambda: client.exist(["k"]),
            lambda: client.size("k"),
            lambda: client.remove(["k"]),
        ):
            with within(1.5), pytest.raises(CallTimeout, match="took longer than") as timeout:
                operation()
            timeouts.append(timeout.value)
    for each in timeouts:
        assert each.returned.wait(10), "it ends with Mooncake's own timeout at the latest"
    assert until_it_works(lambda: client.put("c", b"y"), 10) < 10
    assert client.get("c") == b"y"


def test_a_client_outlives_its_master(own_master: Master, connect: OpenClient) -> None:
    """Nothing is set up anew: not the clients, not the memory that is registered."""
    writer, reader = connect(own_master), connect(own_master, "reader")
    memory = np.arange(4096, dtype=np.uint8)
    place = np.zeros(4096, dtype=np.uint8)
    writer.register(memory.ctypes.data, memory.nbytes, memory)
    reader.register(place.ctypes.data, place.nbytes, place)
    writer.put("old", b"x")
    kill(own_master)
    for operation in (
        lambda: writer.put("new", b"x"),
        lambda: reader.get("old"),
    ):
        with within(8), pytest.raises(MasterUnreachable, match="status -90"):
            operation()
    with Master(port=port_of(own_master)):
        assert (
            until_it_works(
                lambda: writer.put_from([Placed("new", ((memory.ctypes.data, 4096),))]), 15
            )
            < 15
        )
        assert reader.get_into(["new"], [place.ctypes.data], [4096]) == [4096]
        assert (place == memory).all()
        assert reader.get("old") is None, "what a master knew goes with it"
        writer.close()
        reader.close()


def test_a_host_of_memory_that_hangs_is_reported_in_time(
    own_master: Master, connect: OpenClient
) -> None:
    with MemoryHost(own_master.address, 32 * 1024**2) as host:
        options = HASTY.replace("=32MiB", "=0", 1)
        opened: list[MooncakeClient] = []
        until_it_works(lambda: opened.append(connect(own_master, "writer", options)), 10)
        client = opened[-1]
        memory = np.ones(1024**2, np.uint8)
        client.register(memory.ctypes.data, memory.nbytes, memory)
        client.put_from([Placed("k", ((memory.ctypes.data, memory.nbytes),))])
        with stopped(host):
            with within(2), pytest.raises(StoreError, match="k2"):
                client.put_from([Placed("k2", ((memory.ctypes.data, memory.nbytes),))])
            with within(2), pytest.raises(StoreError, match="get k"):
                client.get_into(["k"], [memory.ctypes.data], [memory.nbytes])
        assert until_it_works(lambda: client.put("k3", b"x"), 15) < 15


@pytest.mark.full
@pytest.mark.parametrize("close", [True, False])
def test_a_process_ends_although_a_call_hangs(own_master: Master, close: bool) -> None:
    """A call that came back into an interpreter that is gone would abort the process; and closing a
    client whose master hangs would hold up the whole process."""
    code = textwrap.dedent(
        f"""
        import os, signal, time
        from stagetap.stores.mooncake_calls import CallTimeout
        from stagetap.stores.mooncake_client import open_client
        from stagetap.stores.mooncake_uri import parse_uri
        client = open_client(parse_uri("mooncake://{own_master.address}/run?{HASTY}"), "writer")
        os.kill({own_master.pid}, signal.SIGSTOP)
        try:
            client.put("k", b"x")
        except CallTimeout as error:
            print(error)
        started = time.monotonic()
        if {close}:
            client.close()
        assert time.monotonic() - started < 8
        """
    )
    # Longer than the bound of a put, or Mooncake itself would be first.
    environment = {**os.environ, "MC_RPC_TIMEOUT_MS": "1500"}
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=30,
        )
    finally:
        os.kill(own_master.pid, signal.SIGCONT)
    assert "put k took longer than 1 s" in ended.stdout, ended.stderr
    assert ("hangs: the client is left" in ended.stderr) == close
    assert ended.returncode == 0, ended.stderr
