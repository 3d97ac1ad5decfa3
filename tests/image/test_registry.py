"""A digest, asked of a real registry and built from: Debian's, on loopback."""

from __future__ import annotations

import io
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker
import httpx
import pytest

from engine.harness import free_port
from image.bases import debian
from image.daemon import install
from stagetap_image.bases import Base
from stagetap_image.build import DOCKERFILE, ROOT, registry_digest
from stagetap_image.errors import BuildRefused

pytestmark = [pytest.mark.full, pytest.mark.image]

CONFIGURATION = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: 127.0.0.1:{port}}}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """The address of an empty registry."""
    install({"docker-registry": "docker-registry"})
    address = f"127.0.0.1:{free_port()}"
    file = tmp_path / "registry.yaml"
    file.write_text(CONFIGURATION.format(folder=tmp_path, port=address.rpartition(":")[2]))
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(file)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                httpx.get(f"http://{address}/v2/").raise_for_status()
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(30)


def test_a_base_is_pinned_and_built_from_its_digest(
    client: docker.DockerClient, registry: str
) -> None:
    base = Base(f"{registry}/base", "v1", "", "0.32.0", "3.11", "")
    with pytest.raises(BuildRefused, match="the registry does not say"):
        registry_digest(client, base)
    small = f"FROM {debian(client, print)}\nLABEL pushed=yes\n".encode()
    image, _ = client.images.build(fileobj=io.BytesIO(small), tag=base.name)
    assert '"error"' not in client.images.push(base.image, base.tag)
    digest = registry_digest(client, base)
    pinned = replace(base, digest=digest)
    assert pinned.pinned.startswith("sha256:")
    # The same FROM as the image's, with nothing of this name on the machine.
    client.images.remove(base.name)
    lines = (ROOT / DOCKERFILE).read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("ARG BASE="))
    end = next(index for index, line in enumerate(lines) if line.startswith("FROM "))
    again, _ = client.images.build(
        fileobj=io.BytesIO("\n".join(lines[start : end + 1]).encode()),
        buildargs={"BASE": pinned.name, "DIGEST": pinned.digest},
    )
    assert again.id == image.id
    client.images.remove(again.id, force=True)
