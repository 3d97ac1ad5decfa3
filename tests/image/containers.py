"""Running an image: a command to its end, or a server until the end of a context."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.models.containers import Container
from docker.types import Mount

SHARED_MEMORY = "2g"
"""vLLM's processes talk through /dev/shm."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said."""

    code: int
    stdout: str
    stderr: str


def run(
    client: docker.DockerClient,
    image: str,
    command: Sequence[str],
    *,
    entrypoint: Sequence[str] | None = None,
    mounts: Mapping[Path, str] | None = None,
    **options: Any,
) -> Ended:
    """A command in a new container, to its end."""
    container = _create(client, image, command, entrypoint, mounts, options)
    try:
        container.start()
        code = container.wait()["StatusCode"]
        said = [container.logs(stdout=out, stderr=not out).decode() for out in (True, False)]
        return Ended(code, *said)
    finally:
        container.remove(force=True)


@contextmanager
def serving(
    client: docker.DockerClient,
    image: str,
    command: Sequence[str],
    *,
    entrypoint: Sequence[str] | None = None,
    mounts: Mapping[Path, str] | None = None,
    **options: Any,
) -> Iterator[Container]:
    """A container that runs until the end of the context."""
    container = _create(client, image, command, entrypoint, mounts, options)
    try:
        container.start()
        yield container
    finally:
        container.remove(force=True)


def wait_until_healthy(container: Container, seconds: float = 240) -> None:
    """Until the image's own health check says so."""
    deadline = time.monotonic() + seconds
    while True:
        container.reload()
        state = container.attrs["State"]
        logs = container.logs().decode(errors="replace")[-6000:]
        assert state["Running"], f"ended with {state['ExitCode']}:\n{logs}"
        if state["Health"]["Status"] == "healthy":
            return
        assert time.monotonic() < deadline, f"not healthy: {state['Health']}\n{logs}"
        time.sleep(1)


def _create(
    client: docker.DockerClient,
    image: str,
    command: Sequence[str],
    entrypoint: Sequence[str] | None,
    mounts: Mapping[Path, str] | None,
    options: Mapping[str, Any],
) -> Container:
    bound = [Mount(inside, str(host), "bind") for host, inside in (mounts or {}).items()]
    return client.containers.create(
        image,
        list(command),
        **({"entrypoint": list(entrypoint)} if entrypoint is not None else {}),
        network_mode="host",
        shm_size=SHARED_MEMORY,
        mounts=bound,
        **options,
    )
