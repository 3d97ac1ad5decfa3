"""A run of its own in a real store, for tests."""

from __future__ import annotations

import itertools
import urllib.request
from typing import Any

import stagetap
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.reader.order import CommitOrder
from stagetap.stores.base import (
    StoreCommitter,
    StoreWriter,
    open_store_committer,
    open_store_writer,
)
from stagetap.stores.mooncake_client import MooncakeClient
from stagetap.stores.mooncake_committer import MooncakeStoreCommitter
from stagetap.stores.mooncake_processes import Master
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_writer import MooncakeStoreWriter
from store_samples import Engine

Clients = tuple[MooncakeClient, MooncakeClient]
"""A writer's and a reader's."""

SIZES = "global_segment_size=32MiB&local_buffer_size=2MiB&space_wait=500ms"

_runs = itertools.count()


def keys_in(master: Master) -> list[str]:
    """Every key in the store; only tests can ask for them."""
    url = f"http://{master.address.rpartition(':')[0]}:{master.metrics_port}/get_all_keys"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode().split()


def samples_in(master: Master, run: str) -> list[str]:
    """Keys of a run's samples, their pages and claims included."""
    return [
        key
        for key in keys_in(master)
        if key.startswith(f"{run}/")
        and not key.endswith("/stagetap.json")
        and "/writers/" not in key
        and ".mark" not in key
    ]


class Shared:
    """The session's connection, which closing a store does not end: that takes two seconds."""

    def __init__(self, client: MooncakeClient) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def close(self) -> None:
        """Not this one."""


class Run:
    """An engine on a run of its own, and the run's address."""

    def __init__(
        self,
        master: Master,
        clients: Clients | None = None,
        options: str = SIZES,
        **changes: Any,
    ) -> None:
        """Without `clients`, a writer's and a reader's, it opens its own as everybody does."""
        self.master = master
        self.name = f"run-{next(_runs)}"
        self.uri = f"mooncake://{master.address}/{self.name}?{options}"
        sides: tuple[StoreCommitter, StoreWriter]
        self.clients = clients
        if clients is None:
            sides = (open_store_committer(self.uri), open_store_writer(self.uri))
        else:
            shared: Any = Shared(clients[0])
            sides = (
                MooncakeStoreCommitter(shared, self.name, 0.5),
                MooncakeStoreWriter(shared, self.name, 0.5),
            )
        self.engine = Engine(sides, run=self.name, **changes)

    def dataset(self, verify: bool = True) -> HiddenStatesDataset:
        if self.clients is None:
            return stagetap.open_dataset(self.uri, verify=verify)
        client: Any = Shared(self.clients[1])
        reader = MooncakeStoreReader(
            lambda: client,
            self.name,
            lease_wait_s=10,
            force_remove="force_remove=on" in self.uri,
        )
        dataset = HiddenStatesDataset(reader, CommitOrder(), verify=verify)
        dataset.refresh()
        return dataset

    def keys(self) -> list[str]:
        return samples_in(self.master, self.name)
