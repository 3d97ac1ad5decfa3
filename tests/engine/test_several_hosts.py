"""An engine on two hosts, a trainer on a third; links that are cut, and hosts that are killed.

Host a leads and has the store's master, host b has the second stage, and host c, the trainer's,
lends the memory: what is published travels over the link that is cut.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from engine.conftest import LENGTHS
from engine.harness import TESTS, clean_environment, random_prompts, wait_for
from engine.mooncake_consumer import same
from mooncake_here import require_mooncake
from network_hosts import Host, Network, network
from network_store import network_store, started
from stagetap import open_dataset

pytestmark = [pytest.mark.engine, pytest.mark.mooncake, pytest.mark.full]

LAYERS = [6, 0, 3, 2, 4]
PROMPTS = {f"n/{n}": ids for n, ids in zip(LENGTHS, random_prompts(LENGTHS), strict=True)}
PORT = 8000
PUT_SECONDS = 12
CONSUMER_SECONDS = 30
ENDS_WITHIN = 45.0
"""SIGTERM, and what does not hear it after 15 s is killed."""


class Consumer:
    """What the trainer says, as it says it."""

    def __init__(self, host: Host, uri: str, reference: str) -> None:
        module = ("-m", "engine.hosts_consumer")
        self.process = subprocess.Popen(
            host.command(sys.executable, *module, uri, reference, str(CONSUMER_SECONDS)),
            cwd=TESTS,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        self.said: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        assert self.next() == {"ready": True}

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.put(json.loads(line))

    def next(self, seconds: float = 60) -> dict[str, Any]:
        return self.said.get(timeout=seconds)

    def next_but_errors(self) -> dict[str, Any]:
        """The next thing that is no error; those are shown, and do not go on for ever."""
        deadline = time.monotonic() + 90
        while "error" in (said := self.next()):
            assert time.monotonic() < deadline, said["error"]
            print(said["error"])
        return said


@dataclass
class Serving:
    """A running engine: its two parts, what they wrote, and where it is asked."""

    leader: subprocess.Popen[bytes]
    follower: subprocess.Popen[bytes]
    logs: tuple[Path, Path]
    clients: ThreadPoolExecutor
    client: httpx.Client

    def complete(self, sample_id: str, export: bool = True) -> Future[httpx.Response]:
        body = {
            "model": "tiny",
            "prompt": PROMPTS[sample_id],
            "max_tokens": 1,
            "kv_transfer_params": {"stagetap": {"sample_id": sample_id} if export else None},
        }
        if not export:
            del body["kv_transfer_params"]
        return self.clients.submit(self.client.post, "/v1/completions", json=body)

    def family(self) -> list[psutil.Process]:
        """All of its processes."""
        parts = [psutil.Process(self.leader.pid), psutil.Process(self.follower.pid)]
        return [*parts, *(below for part in parts for below in part.children(recursive=True))]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    require_mooncake()
    with network("abc") as made:
        yield made


@pytest.fixture(scope="module")
def store(hosts: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a master on host a whose memory host c lends."""
    log = tmp_path_factory.mktemp("lender") / "log"
    with network_store(hosts["a"], hosts["c"], log) as address:
        yield address


def address_of(store: str, run: str) -> str:
    return (
        f"mooncake://{store}/{run}?global_segment_size=0&local_buffer_size=4MiB&space_wait=2s"
        f"&put_timeout={PUT_SECONDS}s&get_timeout={PUT_SECONDS}s&rpc_timeout=8s"
    )


@contextmanager
def serving(hosts: Network, model: str, uri: str, folder: Path) -> Iterator[Serving]:
    """``stagetap serve`` on hosts a and b, once it answers."""
    logs = (folder / "leader.log", folder / "follower.log")
    parts: list[subprocess.Popen[bytes]] = []
    with ExitStack() as running:
        for rank, (name, log) in enumerate(zip("ab", logs, strict=True)):
            command = [
                *(sys.executable, "-m", "stagetap", "serve", model),
                *("--layers", ",".join(map(str, LAYERS)), "--store", uri, "--pp", "2"),
                *("--nnodes", "2", "--node-rank", str(rank)),
                *("--master-addr", hosts["a"].address),
                *("--host", hosts["a"].address, "--port", str(PORT)),
                *("--", "--served-model-name", "tiny", "--skip-tokenizer-init"),
            ]
            # As many threads as the reference has: vLLM's attention splits its sums by them.
            environment = clean_environment(VLLM_CPU_OMP_THREADS_BIND=str(rank))
            output = running.enter_context(log.open("wb"))
            command = hosts[name].command(*command)
            how = {"env": environment, "stdout": output, "stderr": subprocess.STDOUT}
            parts.append(running.enter_context(started(command, **how)))
        clients = running.enter_context(hosts["a"].threads(4))
        limits = httpx.Limits(max_connections=None)
        base = f"http://{hosts['a'].address}:{PORT}"
        client = running.enter_context(httpx.Client(base_url=base, timeout=120, limits=limits))

        def healthy() -> bool:
            for part, log in zip(parts, logs, strict=True):
                assert part.poll() is None, log.read_text()[-6000:]
            with suppress(httpx.TransportError):
                return clients.submit(client.get, "/health").result().status_code == 200
            return False

        wait_for(healthy, 240)
        yield Serving(parts[0], parts[1], logs, clients, client)


@pytest.fixture(scope="module")
def reference(captured: Callable[..., Any]) -> str:
    """A directory with what is right."""
    return str(captured("llama", PROMPTS, LAYERS, pp=2)._reader._root)


@pytest.fixture(scope="module")
def running(
    hosts: Network,
    store: str,
    reference: str,
    checkpoint: Callable[..., str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Serving, Consumer]]:
    """One engine and one trainer; the last test ends both."""
    uri = address_of(store, "hosts")
    folder = tmp_path_factory.mktemp("hosts")
    with serving(hosts, checkpoint("llama"), uri, folder) as engine:
        consumer = Consumer(hosts["c"], uri, reference)
        yield engine, consumer
        consumer.process.kill()
        consumer.process.wait()


Running = tuple[Serving, Consumer]


def test_what_the_trainer_gets_is_bitwise_what_one_host_captures(running: Running) -> None:
    engine, consumer = running
    for name in PROMPTS:
        answer = engine.complete(name).result()
        assert answer.status_code == 200, answer.text
        assert answer.json()["kv_transfer_params"]["stagetap"]["state"] == "committed"
        assert consumer.next() == {"sample": name, "equal": True}


def test_a_link_that_is_cut_for_five_seconds_is_ridden_out(
    running: Running, hosts: Network
) -> None:
    engine, consumer = running
    with hosts.cut("c"):
        answers = {name: engine.complete(name) for name in PROMPTS}
        time.sleep(5)
        assert not any(answer.done() for answer in answers.values())
    for name, answer in answers.items():
        assert answer.result().status_code == 200, (name, answer.result().text)
    heard = [consumer.next() for _ in PROMPTS]
    assert sorted(said["sample"] for said in heard) == sorted(PROMPTS)
    assert all(said["equal"] for said in heard)


def test_a_longer_cut_is_a_named_failure_and_the_run_goes_on(
    running: Running, hosts: Network
) -> None:
    engine, consumer = running
    with hosts.cut("c"):
        began = time.monotonic()
        answer = engine.complete("n/33").result()
        assert answer.status_code == 500, answer.text
        message = answer.json()["error"]["message"]
        assert "n/33" in message
        assert "put" in message
        assert f"took longer than {PUT_SECONDS} s" in message
        # The pages are the store's until Mooncake's own bound of 30 s has let go of them.
        assert PUT_SECONDS <= time.monotonic() - began < 45
        assert engine.complete("n/33", export=False).result().status_code == 200

    def again() -> bool:
        return engine.complete("n/33").result().status_code == 200

    wait_for(again, 60)
    assert consumer.next_but_errors() == {"sample": "n/33", "equal": True}
    for name in PROMPTS:
        answer = engine.complete(name).result()
        assert answer.status_code == 200, answer.text
        assert consumer.next_but_errors() == {"sample": name, "equal": True}


def test_a_killed_leader_ends_follower_and_trainer(running: Running) -> None:
    engine, consumer = running
    family = engine.family()
    assert len(family) >= 6, "two supervisors, two front ends, an engine, two workers"
    engine.leader.kill()
    began = time.monotonic()
    assert engine.follower.wait(ENDS_WITHIN) == 1
    assert "\nstagetap: error: host 0 (10.77.0.1) is gone" in engine.logs[1].read_text()
    assert not psutil.wait_procs(family, timeout=ENDS_WITHIN)[1]
    end = consumer.next_but_errors()
    assert "nothing was committed to run 'hosts'" in end["end"]
    assert consumer.process.wait(10) == 0
    print(f"all ended {time.monotonic() - began:.1f} s after the leader")


def test_a_killed_follower_ends_the_leader(
    hosts: Network, store: str, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    uri = address_of(store, "follower")
    with serving(hosts, checkpoint("llama"), uri, tmp_path) as engine:
        family = engine.family()
        assert engine.complete("n/33").result().status_code == 200
        engine.follower.kill()
        assert engine.leader.wait(ENDS_WITHIN) == 1
        assert "\nstagetap: error: host 1 (10.77.0.2) is gone" in engine.logs[0].read_text()
        assert not psutil.wait_procs(family, timeout=ENDS_WITHIN)[1]


def test_a_leader_that_is_stopped_takes_the_follower_along(
    hosts: Network,
    reference: str,
    checkpoint: Callable[..., str],
    stores: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """With a directory that both hosts see."""
    directory = stores("several-hosts")
    with serving(hosts, checkpoint("llama"), str(directory), tmp_path) as engine:
        family = engine.family()
        for name in PROMPTS:
            assert engine.complete(name).result().status_code == 200
        engine.leader.terminate()
        assert engine.leader.wait(ENDS_WITHIN) == 0
        assert engine.follower.wait(ENDS_WITHIN) == 0
        assert "the server of host 0 (10.77.0.1) was stopped" in engine.logs[1].read_text()
        assert not psutil.wait_procs(family, timeout=ENDS_WITHIN)[1]
    found, right = open_dataset(directory, verify=True), open_dataset(reference, verify=True)
    assert sorted(found.sample_ids) == sorted(PROMPTS)
    assert all(same(sample, right[sample.sample_id]) for sample in found)
