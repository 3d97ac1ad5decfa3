"""The compose file, brought up: a request to its engine comes out of its consumer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import httpx
import pytest

from engine.harness import free_port
from image.containers import wait_until_healthy
from image.daemon import install
from stagetap.models import resolve_model
from stagetap_image.build import ROOT, Built

pytestmark = [pytest.mark.full, pytest.mark.image, pytest.mark.timeout(900)]

Compose = Callable[..., str]


@pytest.fixture(scope="module")
def ports() -> dict[str, str]:
    return {"STAGETAP_PORT": str(free_port()), "STAGETAP_STORE_PORT": str(free_port())}


@pytest.fixture(scope="module")
def compose(client: docker.DockerClient, image: Built, ports: dict[str, str]) -> Iterator[Compose]:
    """A function that runs a command of compose on the project and returns its stdout."""
    socket = client.api.get_adapter(client.api.base_url).socket_path
    environment = {
        **os.environ,
        **ports,
        "DOCKER_HOST": f"unix://{socket}",
        "STAGETAP_IMAGE": image.tag,
        "STAGETAP_MODEL": str(Path(resolve_model("smollm2")).resolve()),
        "STAGETAP_LEND": "64MiB",
        "STAGETAP_MAX_LEN": "512",
        "STAGETAP_MAX_SEQS": "8",
    }
    command = [*_program(), "-p", "stagetap-test", "-f", str(ROOT / "docker" / "compose.yaml")]

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [*command, *arguments], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    yield run
    run("down", "--timeout", "60", "--volumes")


def test_a_sample_goes_from_engine_to_consumer(
    client: docker.DockerClient, compose: Compose, ports: dict[str, str]
) -> None:
    compose("up", "--detach")
    for service in ("master", "engine"):
        (container,) = compose("ps", "-q", service).split()
        wait_until_healthy(client.containers.get(container))
    body = {
        "model": "model",
        "prompt": [504, 4626, 761],
        "max_tokens": 1,
        "kv_transfer_params": {"stagetap": {"sample_id": "w1", "prefill_only": True}},
    }
    url = f"http://127.0.0.1:{ports['STAGETAP_PORT']}/v1/completions"
    answer = httpx.post(url, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.json()["kv_transfer_params"]["stagetap"]["state"] == "committed"
    (consumer,) = compose("ps", "-q", "consumer").split()
    assert json.loads(_first_line(client, consumer)) == {
        "sample": "w1",
        "tokens": 3,
        "layers": [2, 15, 27],
        "hidden_states": [3, 3, 576],
        "stages": [0, 1],
    }


def test_the_file_for_gpus_goes_over_the_other(compose: Compose) -> None:
    gpu = str(ROOT / "docker" / "compose.cuda.yaml")
    merged = compose("-f", gpu, "config")
    assert "capabilities" in merged
    assert "--pipeline-parallel-size=2" in merged


def _program() -> list[str]:
    """Compose as docker's plugin, or Debian's program of the same language."""
    plugin = ["docker", "compose"]
    if (
        shutil.which("docker")
        and subprocess.run([*plugin, "version"], capture_output=True).returncode == 0
    ):
        return plugin
    install({"docker-compose": "docker-compose"})
    return ["docker-compose"]


def _first_line(client: docker.DockerClient, consumer: str, seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    while True:
        output = client.containers.get(consumer).logs(stderr=False).decode()
        if lines := output.splitlines():
            return lines[0]
        assert time.monotonic() < deadline, client.containers.get(consumer).logs().decode()
        time.sleep(0.5)
