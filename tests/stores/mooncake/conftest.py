"""A real mooncake_master for the session, and masters of their own for tests that harm one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from mooncake_here import require_mooncake
from mooncake_run import Clients, Run
from stagetap.stores.mooncake_client import MooncakeClient, Role, open_client
from stagetap.stores.mooncake_processes import Master
from stagetap.stores.mooncake_uri import parse_uri

OpenClient = Callable[..., MooncakeClient]

SMALL = "global_segment_size=32MiB&local_buffer_size=4MiB"
LEASE_MS = 500

# How long Mooncake itself waits for a master; tests wait for that more than once.
_RPC_SECONDS = 2.0


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder is marked."""
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here + os.sep):
            item.add_marker(pytest.mark.mooncake)


@pytest.fixture(scope="session")
def mooncake() -> None:
    """Skips where Mooncake cannot be had."""
    require_mooncake(_RPC_SECONDS)


@pytest.fixture(scope="session")
def master(mooncake: None) -> Iterator[Master]:
    """One master for all tests that leave it alone. Leases last half a second."""
    with Master(lease_ms=LEASE_MS) as master:
        yield master


@pytest.fixture(scope="session")
def writer(master: Master) -> Iterator[MooncakeClient]:
    """One client that lends memory, for all tests: closing one takes a second."""
    client = open_client(parse_uri(f"mooncake://{master.address}/run?{SMALL}"), "writer")
    yield client
    client.close()


@pytest.fixture(scope="session")
def reader(master: Master) -> Iterator[MooncakeClient]:
    """One client that lends none, for all tests."""
    client = open_client(parse_uri(f"mooncake://{master.address}/run?{SMALL}"), "reader")
    yield client
    client.close()


@pytest.fixture
def own_master(mooncake: None) -> Iterator[Master]:
    """A master that a test may stop and kill."""
    with Master(lease_ms=LEASE_MS) as master:
        yield master


@pytest.fixture
def connect() -> Iterator[OpenClient]:
    """Open clients that are closed with the test: `connect(master, role, options)`."""
    with ExitStack() as opened:

        def connect(master: Master, role: Role = "writer", options: str = SMALL) -> MooncakeClient:
            client = open_client(parse_uri(f"mooncake://{master.address}/run?{options}"), role)
            opened.callback(client.close)
            return client

        yield connect


@pytest.fixture
def clients(writer: MooncakeClient, reader: MooncakeClient) -> Clients:
    """What runs share."""
    return writer, reader


@pytest.fixture
def run(master: Master, clients: Clients) -> Iterator[Run]:
    """A run of its own."""
    run = Run(master, clients)
    yield run
    run.engine.close()
