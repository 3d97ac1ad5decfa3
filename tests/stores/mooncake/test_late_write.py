"""A write that a dead link holds up, into memory that is another object's when it arrives."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine.harness import TESTS, clean_environment
from network_hosts import network
from network_store import network_store, started

CUT_SECONDS = 45
"""Longer than Mooncake waits for a transfer, and than the master for a lender."""


@pytest.mark.full
def test_what_a_late_write_damages_is_named_and_the_run_goes_on(
    mooncake: None, tmp_path: Path
) -> None:
    with network("ab") as hosts, network_store(hosts["a"], hosts["b"], tmp_path / "log") as address:
        uri = f"mooncake://{address}/run-1?global_segment_size=0&local_buffer_size=4MiB"
        command = hosts["a"].command(sys.executable, "-m", "stores.mooncake.late_writer", uri)
        with started(
            command,
            cwd=TESTS,
            env=clean_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as writer:
            assert writer.stdout.readline() == "ready\n"
            with hosts.cut("b"):
                _go_on(writer)
                time.sleep(CUT_SECONDS)
            _go_on(writer)
            said = json.loads(writer.stdout.readline())
    print(said)
    assert said["failed"], "nothing was under way when the link was cut"
    found = said["found"]
    assert set(found) - {"right"}, "nothing arrived late"
    assert not {"wrong", "SampleTimeout"} & set(found), "one at least is right: the last"
    assert sum(found.values()) > said["exported"]


def _go_on(process: subprocess.Popen[str]) -> None:
    process.stdin.write("go on\n")
    process.stdin.flush()
