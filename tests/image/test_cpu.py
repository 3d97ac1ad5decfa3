"""The image for CPUs, built and run: two stages, states over HTTP, equal to one stage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from engine.harness import free_port
from image.bases import PYTHON, VENV, altered
from image.containers import run, serving, wait_until_healthy
from image.report import REPORT
from stagetap import open_dataset
from stagetap.models import resolve_model
from stagetap_image.bases import Base
from stagetap_image.build import ROOT, Built, build_image, revision
from stagetap_image.errors import BuildRefused

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

LAYERS = [2, 15, 27, 30]
MODEL = "/models/smollm2"
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def models() -> Path:
    return Path(resolve_model("smollm2")).resolve()


def inside(client: docker.DockerClient, image: Built, *script: str) -> str:
    ended = run(client, image.tag, ["-c", "\n".join(script)], entrypoint=["sh"])
    assert ended.code == 0, ended
    return ended.stdout.strip()


def test_labels_say_what_is_in_it(client: docker.DockerClient, image: Built) -> None:
    labels = client.images.get(image.tag).labels
    assert labels["stagetap.vllm.version"] == "0.32.0"
    assert labels["stagetap.series.sha256"] == image.series_sha256
    # Whether something was edited since does not matter here.
    built_from = labels["org.opencontainers.image.revision"].removesuffix("-dirty")
    assert built_from == revision(ROOT).removesuffix("-dirty")
    assert labels["org.opencontainers.image.version"] == "0.1.0"
    assert labels["org.opencontainers.image.base.name"] == image.base


def test_how_it_is_started_and_stopped(client: docker.DockerClient, image: Built) -> None:
    config = client.images.get(image.tag).attrs["Config"]
    assert config["Entrypoint"] == ["vllm", "serve"]
    assert config["StopSignal"] == "SIGTERM"
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python3"]
    assert config["User"] == "stagetap"
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in config["Env"]
    assert inside(client, image, "id -u; pwd") == "10001\n/home/stagetap"


def test_nothing_is_left_of_the_build(client: docker.DockerClient, image: Built) -> None:
    script = ("ls -d /src /overlay /tmp/* /root/.cache /home/stagetap/.* /var/lib/apt/lists/*",)
    left = inside(client, image, f"{script[0]} 2>/dev/null || true").split()
    skeleton = {f"/home/stagetap/{name}" for name in (".", "..", ".bashrc", ".profile")}
    assert set(left) <= skeleton | {"/home/stagetap/.bash_logout"}
    assert inside(client, image, "command -v git gcc make || echo none") == "none"
    found = inside(client, image, "python3 -m pip list --format=freeze --disable-pip-version-check")
    names = {line.partition("==")[0].lower() for line in found.splitlines()}
    assert "stagetap" in names
    assert not {"hatchling", "docker", "pytest", "ruff"} & names


def test_the_image_adds_little_to_its_base(image: Built) -> None:
    assert 0 < image.added_bytes < 250 * 2**20


@pytest.mark.parametrize(
    "file",
    ["vllm/v1/engine/core.py", pytest.param("vllm/sequence.py", marks=pytest.mark.full)],
)
def test_a_base_with_one_altered_file_ends_the_build(
    client: docker.DockerClient, base: Base, file: str
) -> None:
    """Whether the series touches it or not."""
    other = altered(
        client, base, f"echo '# mine' >> {VENV}/lib/python{PYTHON}/site-packages/{file}"
    )
    with pytest.raises(BuildRefused, match=re.escape(file)):
        build_image(client, "cpu", other, tag="stagetap-test:bad", network="host", log=print)


class Served:
    """A server in a container, and the folder of its store on this machine."""

    def __init__(self, client: httpx.Client, store: Path):
        self.client = client
        self.store = store


@pytest.fixture(scope="module")
def served(client: docker.DockerClient, image: Built, tmp_path_factory: Any) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("data")
    data.chmod(0o777)  # for the user of the image
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [MODEL, "--served-model-name", "smollm2", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--stagetap-layers", ",".join(map(str, LAYERS)), "--stagetap-store", "/data/served"]
    command += ["--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp"]
    command += ["--enforce-eager", "--max-model-len", "512"]
    environment = {
        **CPU,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "STAGETAP_HEALTH_URL": f"{url}/health",
    }
    mounts = {data: "/data", models(): MODEL}
    with serving(client, image.tag, command, mounts=mounts, environment=environment) as container:
        wait_until_healthy(container)
        with httpx.Client(base_url=url, timeout=120) as http:
            yield Served(http, data / "served")
        container.stop(timeout=60)
        container.reload()
        assert container.attrs["State"]["ExitCode"] == 0, container.logs().decode()[-3000:]


def test_states_over_http_are_read_outside(served: Served) -> None:
    body = {
        "model": "smollm2",
        "prompt": [504, 4626, 761],
        "max_tokens": 1,
        "kv_transfer_params": {"stagetap": {"sample_id": "w1"}},
    }
    answer = served.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()["kv_transfer_params"]["stagetap"]
    assert said["state"] == "committed"
    sample = open_dataset(served.store, stream="residual", verify=True)["w1"]
    assert sample.input_ids.tolist() == [504, 4626, 761]
    assert sample.hidden_states.shape == (3, 3, 576)
    assert {fragment.stage for fragment in sample.manifest.fragments} == {0, 1}


def test_two_stages_equal_one_in_the_image(client: docker.DockerClient, image: Built) -> None:
    command = ["equivalence", "--model", MODEL, "--pp", "2", "--lengths", "1,33,129"]
    command += ["--layers", ",".join(map(str, LAYERS)), "--json"]
    ended = run(
        client,
        image.tag,
        command,
        entrypoint=["stagetap"],
        mounts={models(): MODEL},
        environment=CPU,
    )
    assert ended.code == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout)
    assert found["bitwise"]
    assert found["stages"] == {"0": [2, 15], "1": [27, 30]}
    REPORT["cpu equivalence"] = (
        f"bitwise equal to one stage: {found['samples']} samples, {found['tensors']} tensors"
    )
