"""Supervisors as processes, with servers that are shells: who ends, takes the others along."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest

Start = Callable[..., "subprocess.Popen[str]"]

CODE = """
import os, sys
from stagetap.errors import StageTapError
from stagetap.hosts.supervisor import Hosts, supervise
rank, count, port, command = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
try:
    sys.exit(supervise(command, os.environ, Hosts(count, rank, "127.0.0.1", port)))
except StageTapError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""
# A server with a process below it that does not hear of its end.
SERVER = ("sh", "-c", "trap 'exit 0' TERM; setsid sleep 1000 & echo server; wait")


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(port: int) -> Iterator[Start]:
    """Start the supervisor of this rank, and wait for its server."""
    started: list[subprocess.Popen[str]] = []

    def start(rank: int, count: int = 2, server: tuple[str, ...] = SERVER) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CODE, str(rank), str(count), str(port), *server]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield start
    for child in started:
        below = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
        for process in [child, *below]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()


def below(supervisor: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(supervisor.pid).children(recursive=True)


def ended(supervisor: subprocess.Popen[str], seconds: float = 10) -> tuple[int, str]:
    """Exit code and stderr."""
    _, stderr = supervisor.communicate(timeout=seconds)
    return supervisor.returncode, stderr


def met(leader: subprocess.Popen[str], rank: int) -> None:
    assert leader.stderr is not None
    assert f"host {rank} (127.0.0.1) is here" in leader.stderr.readline()


def gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=10)[1]


def test_a_leader_that_is_asked_to_stop_takes_the_follower_along(start: Start) -> None:
    leader, follower = start(0), start(1)
    met(leader, 1)
    processes = below(leader) + below(follower)
    assert len(processes) == 4
    leader.send_signal(signal.SIGTERM)
    assert ended(leader) == (0, "")
    code, said = ended(follower)
    assert (code, said) == (
        0,
        "stagetap: the server of host 0 (127.0.0.1) was stopped: this host's server ends\n",
    )
    assert gone(processes)


@pytest.mark.parametrize("killed", [0, 1])
def test_who_is_killed_takes_the_other_along(start: Start, killed: int) -> None:
    hosts = [start(0), start(1)]
    met(hosts[0], 1)
    processes = below(hosts[0]) + below(hosts[1])
    hosts[killed].kill()
    code, said = ended(hosts[1 - killed])
    assert code == 1
    assert said.strip().startswith(
        f"HostLost: host {killed} (127.0.0.1) is gone: its `stagetap serve` ended without a word: "
        "this host's server was ended"
    )
    for process in processes:  # a sleep in a session of its own has no parent that could end it
        with suppress(psutil.NoSuchProcess):
            if process.name() == "sleep" and process.ppid() == 1:
                process.kill()
    assert gone(processes)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_that_is_killed_ends_all_of_it_everywhere(start: Start, rank: int) -> None:
    hosts = [start(0, 3), start(1, 3), start(2, 3)]
    for _ in (1, 2):
        assert hosts[0].stderr is not None
        assert "is here" in hosts[0].stderr.readline()
    processes = [process for host in hosts for process in below(host)]
    (server,) = psutil.Process(hosts[rank].pid).children()
    server.kill()
    assert ended(hosts[rank])[0] == 128 + signal.SIGKILL
    for other in {0, 1, 2} - {rank}:
        code, said = ended(hosts[other])
        assert code == 1
        assert f"the server of host {rank} (127.0.0.1) ended with exit code 137" in said
    assert gone(processes)


def test_a_server_that_ends_by_itself_is_a_failure(start: Start) -> None:
    leader, follower = start(0), start(1, server=("sh", "-c", "echo server; sleep 1"))
    met(leader, 1)
    assert ended(follower)[0] == 1
    code, said = ended(leader)
    assert code == 1
    assert "the server of host 1 (127.0.0.1) ended with exit code 0" in said


def test_a_refusal_of_the_server_keeps_its_exit_code(start: Start) -> None:
    leader = start(0, server=("sh", "-c", "echo server; exit 2"))
    assert ended(leader)[0] == 2


def test_the_server_knows_that_it_is_the_front_end(start: Start) -> None:
    code = "import os; print(os.environ['STAGETAP_FRONT_END'] == str(os.getpid()), flush=True)"
    leader = start(
        0, server=("sh", "-c", 'echo server; exec "$@"', "sh", sys.executable, "-c", code)
    )
    out, _ = leader.communicate(timeout=10)
    assert out == "True\n"


@pytest.mark.parametrize(
    ("rank", "count", "said"),
    [
        (1, 3, "--nnodes 3 here, 2 on host 0"),
        (2, 2, "--node-rank 2 is none of 2 hosts"),
    ],
)
def test_who_does_not_belong_here_is_turned_away(
    start: Start, rank: int, count: int, said: str
) -> None:
    leader = start(0)
    stranger = start(rank, count)
    code, why = ended(stranger)
    assert code == 1
    assert why.startswith(f"Refused: {said}")
    follower = start(1)
    met(leader, 1)
    second = start(1)
    assert "--node-rank 1 is another host's" in ended(second)[1]
    assert leader.poll() is follower.poll() is None


def test_a_stranger_does_not_disturb(start: Start, port: int) -> None:
    leader = start(0)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.send(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(10) == b""
    start(1)
    met(leader, 1)


def test_an_address_of_another_host_is_refused(port: int) -> None:
    code = CODE.replace('"127.0.0.1"', '"192.0.2.1"')
    command = [sys.executable, "-c", code, "0", "2", str(port), "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    assert done.stderr.startswith(f"Refused: host 0 cannot listen on 192.0.2.1:{port}")


def test_a_second_signal_does_not_wait(start: Start) -> None:
    stubborn = ("sh", "-c", "trap '' TERM; echo server; sleep 1000")
    leader = start(0, server=stubborn)
    leader.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        leader.wait(0.5)
    leader.send_signal(signal.SIGTERM)
    assert ended(leader)[0] == 128 + signal.SIGKILL
