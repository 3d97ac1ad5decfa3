"""``stagetap verify`` on a run in a real store."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from mooncake_run import Clients, Run
from stagetap.stores.mooncake_client import MooncakeClient
from stagetap.stores.mooncake_processes import Master, free_port
from stagetap.stores.mooncake_verify import listing, verify_run


@pytest.fixture
def run(master: Master, writer: MooncakeClient, reader: MooncakeClient) -> Iterator[Run]:
    """Two whole samples."""
    clients: Clients = (writer, reader)
    run = Run(master, clients)
    run.engine.export("whole", tokens=9)
    run.engine.export("other", tokens=5, seed=1)
    yield run
    run.engine.close()
    writer.remove(run.keys(), force=True)


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagetap", "verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_run_with_leftovers(run: Run) -> None:
    keys = set(run.keys())
    run.engine.publish(run.engine.ref("killed"), 9)
    metrics = f"127.0.0.1:{run.master.metrics_port}"
    done = verify(run.uri, "--json", "--metrics", metrics)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["samples"], found["problems"]) == (2, [])
    assert [each["path"].split("/")[1] for each in found["orphans"]] == ["killed"]
    assert found["swept_bytes"] is None
    shown = verify(run.uri, "--metrics", f"http://{metrics}/metrics", "--no-checksums")
    assert "2 samples whole" in shown.stdout
    assert "1 leftovers that no commit names" in shown.stdout
    report = verify_run(
        run.dataset()._reader,  # type: ignore[arg-type]
        listing(metrics),
        checksums=True,
        gc=True,
        settle_s=0,
    )
    assert report.swept_bytes == found["orphans"][0]["size_bytes"]
    assert set(run.keys()) == keys


def test_a_fragment_that_is_gone(run: Run, writer: MooncakeClient) -> None:
    made = run.engine.export("broken", tokens=5)
    writer.remove([made.fragments[1].path], force=True)
    done = verify(run.uri, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    (problem,) = found["problems"]
    assert (problem["kind"], problem["sample_id"], problem["stage"]) == (
        "MissingFragment",
        "broken",
        1,
    )
    assert found["samples"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--gc"], 2, "add --metrics HOST:PORT of the master"),
        (["--metrics", "127.0.0.1:{free}"], 1, "give the metrics address that"),
    ],
)
def test_what_cannot_be_done_says_what_to_do(
    run: Run, arguments: list[str], code: int, said: str
) -> None:
    free = free_port("127.0.0.1")
    done = verify(run.uri, *[each.format(free=free) for each in arguments])
    assert done.returncode == code
    assert said in done.stderr
    assert "looked at again" not in done.stderr


def test_a_run_that_is_not_there(master: Master) -> None:
    done = verify(f"mooncake://{master.address}/nobody")
    assert done.returncode == 1
    assert "there is no run 'nobody'" in done.stderr
