"""`stagetap store up`: a store in the foreground, with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stagetap.cli import main
from stagetap.stores.mooncake_client import open_client
from stagetap.stores.mooncake_probe import probe_master
from stagetap.stores.mooncake_processes import Master
from stagetap.stores.mooncake_uri import parse_uri


@contextmanager
def store_up(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The command, and what it printed when the store was there."""
    command = [sys.executable, "-m", "stagetap", "store", "up", "--json", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            yield child, json.loads(child.stdout.readline())
        finally:
            child.kill()


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int]) -> None:
    """Some seconds at most."""
    for _ in range(100):
        if not any(map(alive, pids)):
            return
        time.sleep(0.05)
    raise AssertionError(f"still running: {pids}")


def test_up_with_memory_until_ctrl_c(mooncake: None, tmp_path: Path) -> None:
    log = tmp_path / "mooncake.log"
    with store_up("--port", "0", "--lend", "32MiB", "--log", str(log)) as (child, said):
        assert said["lent_bytes"] == 32 * 1024**2
        assert said["uri"] == f"mooncake://{said['master']}/RUN?global_segment_size=0"
        assert said["metrics"].startswith("http://127.0.0.1:")
        assert list(said["pids"]) == ["mooncake_master", "mooncake_client"]
        assert all(map(alive, said["pids"].values()))
        client = open_client(parse_uri(said["uri"]), "writer")
        client.put("k", b"x")
        assert client.get("k") == b"x"
        client.close()
        child.send_signal(signal.SIGINT)
        assert child.wait(15) == 0
        assert child.stderr is not None
        assert "what the store held is gone" in child.stderr.read()
    wait_until_gone(list(said["pids"].values()))
    assert log.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_programs_go_however_it_goes(mooncake: None, number: signal.Signals) -> None:
    with store_up("--port", "0") as (child, said):
        probe_master(said["master"], 2.0)
        child.send_signal(number)
        child.wait(15)
    wait_until_gone(list(said["pids"].values()))


def test_a_program_that_ends_by_itself_ends_it_with_an_error(mooncake: None) -> None:
    with store_up("--port", "0") as (child, said):
        os.kill(said["pids"]["mooncake_master"], signal.SIGKILL)
        assert child.wait(15) == 1
        assert child.stderr is not None
        assert "stagetap: error: mooncake_master ended: killed by SIGKILL\n" in child.stderr.read()


def test_the_lender_is_killed(mooncake: None) -> None:
    """What it said at its start is not why."""
    with store_up("--port", "0", "--lend", "16MiB") as (child, said):
        os.kill(said["pids"]["mooncake_client"], signal.SIGKILL)
        assert child.wait(15) == 1
        assert child.stderr is not None
        assert "stagetap: error: mooncake_client ended: killed by SIGKILL\n" in child.stderr.read()


def test_over_ipv6(mooncake: None) -> None:
    """Its address is one that StageTap takes, and bytes travel there."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with store_up("--port", "0", "--host", "::1", "--lend", "16MiB") as (_, said):
        assert said["metrics"].startswith("http://[::1]:")
        assert said["master"].startswith("[::1]:")
        code = (
            "import sys; from stagetap.stores.mooncake_client import open_client;"
            "from stagetap.stores.mooncake_uri import parse_uri;"
            "client = open_client(parse_uri(sys.argv[1]), 'writer');"
            "client.put('k', b'x'); print(client.get('k')); client.close()"
        )
        # Mooncake decides once in a process how it speaks.
        done = subprocess.run(
            [sys.executable, "-c", code, said["uri"]], capture_output=True, text=True, timeout=30
        )
        assert done.stdout == "b'x'\n", done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--lend", "5Q"], 2, "--lend: '5Q' is no size"),
        (["--lend", "0"], 2, "--lend: a size of nothing"),
        (["--lend", "1KiB"], 2, "--lend: 1KiB is out of range: Mooncake lends 16MiB at least"),
        (["--lend", "400TiB"], 2, "--lend 400TiB: 439804651110400 bytes are more than the"),
        (["--log", "/"], 2, "--log /: that is a directory; name a file in it"),
        (["--log", "/no/such/x.log"], 2, "--log /no/such/x.log: there is no directory /no/such"),
        (["--host", "0.0.0.0"], 2, "give the one address"),
        (["--host", "192.0.2.1", "--port", "0"], 1, "cannot listen on 192.0.2.1:0: Cannot assign"),
    ],
)
def test_refused(
    mooncake: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["stagetap", "store", "up", *arguments])
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        signal.signal(signal.SIGTERM, terminate)
    assert ended.value.code == code
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken(master: Master, mooncake: None) -> None:
    """The other master answers; that must not be taken for ours."""
    port = master.address.rpartition(":")[2]
    ended = subprocess.run(
        [sys.executable, "-m", "stagetap", "store", "up", "--port", port],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 1
    assert f"stagetap: error: cannot listen on {master.address}: Address already" in ended.stderr
