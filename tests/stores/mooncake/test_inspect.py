"""``stagetap inspect`` on a run that is being written and consumed."""

from __future__ import annotations

import json
import subprocess
import sys

import stagetap
from mooncake_run import Clients, Run
from stagetap.stores.mooncake_processes import Master


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagetap", "inspect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_live_run(master: Master, clients: Clients) -> None:
    run = Run(master, clients)
    for number in range(8):
        run.engine.export(f"s{number}", tokens=10)
    run.engine.committer.record_error(run.engine.ref("bad"), 1, "broken")
    with stagetap.consume(run.uri, limit=2) as stream:
        list(stream)
        found = json.loads(inspect(run.uri, "--json").stdout)
    assert (found["samples"], found["tokens"]) == (6, 60)
    assert [each["run_id"] for each in found["runs"]] == [run.name]
    assert [each["sample_id"] for each in found["recent"]] == ["s7", "s6", "s5", "s4", "s3"]
    assert [stage["fragments"] for stage in found["stages"]] == [6, 6]
    shown = inspect(run.uri)
    assert shown.returncode == 0
    assert "s7" in shown.stdout
    sample = json.loads(inspect(run.uri, "s7", "--json").stdout)
    assert sample["fragments"][0]["path"] == f"{run.name}/s7/{sample['attempt']}/0"
    run.engine.close()


def test_a_run_that_is_not_there(master: Master) -> None:
    done = inspect(f"mooncake://{master.address}/nobody")
    assert done.returncode in (1, 2)
    assert "nobody" in done.stderr
