"""A Mooncake store whose master and memory are on hosts of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from network_hosts import Host
from stagetap.stores.mooncake_package import find_program


@contextmanager
def started(command: list[str], **how: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that ends with the context."""
    process = subprocess.Popen(command, **how)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def network_store(leader: Host, lender: Host, log: Path) -> Iterator[str]:
    """The address of a master on one host whose memory, 256 MiB, another lends.

    Args:
        leader: has the master.
        lender: has the memory.
        log: to which the lender writes.
    """
    up = ("-m", "stagetap", "store", "up", "--host", leader.address, "--port", "0")
    command = leader.command(sys.executable, *up, "--lease-ms", "500", "--json")
    with started(command, stdout=subprocess.PIPE, text=True) as master:
        address = json.loads(master.stdout.readline())["master"]
        memory = lender.command(
            find_program("mooncake_client"),
            f"-master_server_address={address}",
            f"-host={lender.address}",
            "-port=50052",
            "-protocol=tcp",
            "-metadata_server=P2PHANDSHAKE",
            f"-global_segment_size={256 * 1024**2}",
        )
        with log.open("wb") as output, started(memory, stdout=output, stderr=output):
            yield address
