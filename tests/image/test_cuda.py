"""The image for CUDA, as far as a machine without a GPU can tell: on the GPU build's sources."""

from __future__ import annotations

import json

import docker
import pytest

from image.bases import altered
from image.containers import run
from stagetap_image.bases import Base
from stagetap_image.build import Built, build_image
from stagetap_image.errors import BuildRefused

pytestmark = [pytest.mark.full, pytest.mark.image, pytest.mark.timeout(900)]

SITE = "/opt/venv/lib/python3.11/site-packages"


def stagetap(client: docker.DockerClient, image: Built, *command: str) -> dict[str, object]:
    ended = run(client, image.tag, command, entrypoint=["stagetap"])
    assert ended.code == 0, ended
    return json.loads(ended.stdout)


def test_the_series_is_applied_to_the_gpu_build(
    client: docker.DockerClient, cuda_image: Built
) -> None:
    found = stagetap(client, cuda_image, "patch", "verify", "--json")
    assert found["state"] == "applied"
    assert found["series_sha256"] == cuda_image.series_sha256


def test_the_doctor_finds_all_well_that_files_tell(
    client: docker.DockerClient, cuda_image: Built
) -> None:
    found = stagetap(client, cuda_image, "doctor", "--static", "--json")
    assert {"patch series", "plugin"} <= {check["check"] for check in found["checks"]}


def test_mooncake_is_the_build_for_its_cuda(client: docker.DockerClient, cuda_image: Built) -> None:
    command = ["-m", "pip", "list", "--format=freeze", "--disable-pip-version-check"]
    listed = run(client, cuda_image.tag, command, entrypoint=["python3"]).stdout
    names = {line.partition("==")[0] for line in listed.splitlines()}
    assert "mooncake-transfer-engine-cuda13" in names
    assert not {"mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"} & names


def test_the_environment_is_that_of_a_gpu(client: docker.DockerClient, cuda_image: Built) -> None:
    config = client.images.get(cuda_image.tag).attrs["Config"]
    assert "VLLM_USE_V2_MODEL_RUNNER=1" in config["Env"]
    assert not any(entry.startswith("TRITON_INTERPRET") for entry in config["Env"])


@pytest.mark.parametrize(
    ("step", "named"),
    [
        (
            f"sed -i s/13.0/12.9/ {SITE}/torch/version.py",
            "built for CUDA 12 and needs mooncake-transfer-engine; bases.lock names",
        ),
        ("rm /etc/ld.so.conf.d/cuda.conf && ldconfig", "needs libcudart.so.13"),
        (f"rm {SITE}/vllm/v1/engine/core.py", r"vllm/v1/engine/core\.py is missing"),
    ],
)
def test_a_base_that_is_not_what_it_should_be_ends_the_build(
    client: docker.DockerClient, bare_base: Base, step: str, named: str
) -> None:
    other = altered(client, bare_base, step)
    with pytest.raises(BuildRefused, match=named):
        build_image(client, "cuda", other, tag="stagetap-test:bad", network="host", log=print)
