"""How the engine tests start engines: each in a process of its own, from a clean environment."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

TESTS = Path(__file__).resolve().parents[1]
ENGINE_VARIABLES = ("VLLM_", "TRITON_", "STAGETAP_", "CUDA_VISIBLE")


def clean_environment(**changes: str) -> dict[str, str]:
    """The caller's environment without what steers an engine, plus ``changes``."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(ENGINE_VARIABLES)
    }
    return {**kept, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **changes}


def store_folder(name: str) -> Path:
    """A fresh folder for a store, in memory where the machine has that: tests need no disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    return Path(tempfile.mkdtemp(prefix=f"stagetap-test-{name}-", dir=base))


@dataclass
class Arm:
    """One engine start in a child process.

    Attributes:
        job: name of a function ``module:function`` in the tests; it runs in the child with the
            started session and returns something that JSON can hold.
        session: arguments of ``CaptureSession``; None starts no session.
        environment: on top of a clean one.
    """

    job: str
    session: dict[str, Any] | None
    arguments: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, timeout: float = 300) -> Any:
        """Run the job and return its result; what the child printed is shown when it fails."""
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder, "result.json")
            spec = {
                "job": self.job,
                "session": self.session,
                "arguments": self.arguments,
                "result": str(result),
            }
            child = subprocess.run(
                [sys.executable, "-m", "engine.arm", json.dumps(spec)],
                cwd=TESTS,
                env=clean_environment(**self.environment),
                capture_output=True,
                text=True,
                timeout=timeout,
            )
            if child.returncode != 0:
                tail = (child.stdout + child.stderr)[-6000:]
                raise AssertionError(f"{self.job} ended with {child.returncode}:\n{tail}")
            return json.loads(result.read_text())


def random_prompts(lengths: Iterable[int], seed: int = 0, vocabulary: int = 500) -> list[list[int]]:
    """One prompt of random token ids per length."""
    rng = random.Random(seed)
    return [[rng.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Ask until something holds that happens by itself."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def refusals(stderr: str) -> list[str]:
    """What stands behind ``stagetap: refused:`` at the start of a line."""
    lead = "stagetap: refused: "
    return [line.removeprefix(lead) for line in stderr.splitlines() if line.startswith(lead)]


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A running ``stagetap serve``.

    Attributes:
        client: asks it.
        process: the front end; its engine and workers are below it.
        log: what all of them printed.
    """

    client: httpx.Client
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def server(
    arguments: list[str], environment: dict[str, str], log: Path, timeout: float = 240
) -> Iterator[Server]:
    """A real ``stagetap serve`` on loopback, in its own process group, ended by its pid.

    It must run until the end of the context, unless it was told to stop and ended well.
    """
    port = free_port()
    command = [sys.executable, "-m", "stagetap", "serve", *arguments]
    command[5:5] = ["--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=clean_environment(**environment),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        limits = httpx.Limits(max_connections=None)
        base_url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=base_url, timeout=120, limits=limits) as client:
            deadline = time.monotonic() + timeout
            while True:
                assert process.poll() is None, log.read_text()[-6000:]
                assert time.monotonic() < deadline, log.read_text()[-6000:]
                try:
                    if client.get("/health").status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.25)
            yield Server(client, process, log)
            assert process.poll() in (None, 0), log.read_text()[-6000:]
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
