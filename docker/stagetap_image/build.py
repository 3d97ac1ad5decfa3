"""From outside: builds an image through the Docker API, and says what came of it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import APIError, DockerException, ImageNotFound
from docker.utils.build import exclude_paths

from stagetap.patchstack.locate import pinned_versions
from stagetap.patchstack.series import read_series
from stagetap_image.bases import Base
from stagetap_image.errors import BuildRefused

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = "docker/Dockerfile"
REFUSED = "image: refused: "
"""What the line starts with that says why a step of ours ended the build."""

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Built:
    """An image, and what a reader of the build's report wants to know."""

    tag: str
    image_id: str
    base: str
    digest: str
    vllm: str
    series_sha256: str
    base_bytes: int
    added_bytes: int

    def report(self) -> dict[str, str]:
        """By name, in the order in which they are shown."""
        return {
            "image": f"{self.tag} {self.image_id}",
            "base": self.base,
            "digest": self.digest,
            "vllm": self.vllm,
            "series": self.series_sha256,
            "bytes added": f"{self.added_bytes:,} over {self.base_bytes:,}",
            "doctor": "well",  # its last step, without which there is no image
        }


def connect(base_url: str | None = None) -> docker.DockerClient:
    """A client of the daemon at ``base_url``, or of the one that the environment names.

    Raises BuildRefused when none answers.
    """
    try:
        client = docker.DockerClient(base_url) if base_url else docker.from_env()
        client.ping()
    except DockerException as error:
        raise BuildRefused(
            f"no Docker daemon answers: {error}; start one, or set DOCKER_HOST"
        ) from None
    return client


def build_arguments(base: Base, root: Path = ROOT) -> dict[str, str]:
    """What the Dockerfile is told: all that a label says, and what the base has to be.

    Raises BuildRefused for a vLLM without a series, SeriesError for a damaged one.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return {
        "BASE": base.name,
        "DIGEST": base.digest,
        "VLLM_VERSION": base.vllm,
        "PYTHON_VERSION": base.python,
        "MOONCAKE": base.mooncake,
        "SERIES": _series_digest(base, root / "patches"),
        "VERSION": project["version"],
        "REVISION": revision(root),
    }


def docker_command(target: str, base: Base, tag: str, network: str | None) -> list[str]:
    """The command that builds what :func:`build_image` does, to be run at the root of the sources.

    Raises as :func:`build_arguments`.
    """
    command = ["docker", "build", "-f", DOCKERFILE, "--target", target, "--tag", tag]
    command += ["--network", network] if network else []
    for name, value in build_arguments(base).items():
        command += ["--build-arg", f"{name}={value}"]
    return [*command, "."]


def build_image(
    client: docker.DockerClient,
    target: str,
    base: Base,
    *,
    tag: str,
    log: Callable[[str], None],
    network: str | None = None,
    extra_arguments: Mapping[str, str] | None = None,
) -> Built:
    """Build one target of the Dockerfile and tag it.

    Args:
        log: is given the build's output, line by line.
        network: of the steps of the build; ``host`` where the daemon has no bridge.
        extra_arguments: further arguments of the Dockerfile.

    Raises:
        BuildRefused: a step failed; the message is what it said.
    """
    arguments = {**build_arguments(base), **(extra_arguments or {})}
    steps = client.api.build(
        path=str(ROOT),
        dockerfile=DOCKERFILE,
        target=target,
        buildargs=arguments,
        network_mode=network,
        tag=tag,
        rm=True,
        forcerm=True,
        decode=True,
    )
    try:
        _follow(steps, log)
    except BuildRefused as error:
        if _image_of(client, base) is not None:
            raise
        raise BuildRefused(
            f"{base.name} is not on this machine and does not come from its registry: {error}; "
            "docker load it, or name the same image of a mirror in a --lock of your own"
        ) from None
    image = client.images.get(tag)
    base_bytes = _size_bytes(client, base)
    return Built(
        tag=tag,
        image_id=image.id,
        base=base.name,
        digest=base.pinned,
        vllm=base.vllm,
        series_sha256=arguments["SERIES"],
        base_bytes=base_bytes,
        added_bytes=image.attrs["Size"] - base_bytes,
    )


def registry_digest(client: docker.DockerClient, base: Base) -> str:
    """What the tag of a base stands for in its registry now.

    Raises BuildRefused when the registry cannot be asked.
    """
    try:
        return str(client.images.get_registry_data(base.name).id)
    except APIError as error:
        raise BuildRefused(f"{base.name}: the registry does not say: {error.explanation}") from None


def _series_digest(base: Base, patches: Path) -> str:
    if base.vllm not in (versions := pinned_versions(patches)):
        raise BuildRefused(
            f"bases.lock: vllm is {base.vllm!r} for {base.name}, which has no patch series; there "
            f"are {', '.join(versions)}"
        )
    return read_series(patches / "vllm" / base.vllm).digest


def revision(root: Path) -> str:
    """The commit of the sources, ``unknown`` outside of git.

    ``-dirty`` with changes on top, and with a file that is built in, not committed and not ignored.
    """
    commit = _git(root, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    if commit is None:
        return "unknown"
    new = (_git(root, "ls-files", "-z", "--others", "--exclude-standard") or "").split("\0")
    if not commit.endswith("-dirty") and not _context(root).isdisjoint(new):
        commit += "-dirty"
    return commit


def _git(root: Path, *arguments: str) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def _context(root: Path) -> set[str]:
    """The files that a build is given, as Docker's client picks them."""
    file = root / ".dockerignore"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return set(exclude_paths(str(root), patterns, DOCKERFILE))


def _follow(steps: Any, log: Callable[[str], None]) -> None:
    """Pass the output on. Raises BuildRefused with the step's own words when one fails."""
    refused = None
    for step in steps:
        if error := step.get("error"):
            raise BuildRefused(refused or str(error).strip())
        for line in _COLOUR.sub("", str(step.get("stream", ""))).splitlines():
            if line.startswith(REFUSED):
                refused = line.removeprefix(REFUSED)
            if line.strip():
                log(line)


def _size_bytes(client: docker.DockerClient, base: Base) -> int:
    image = _image_of(client, base)
    if image is None:
        raise BuildRefused(f"{base.name} is not on this machine any more")
    return int(image.attrs["Size"])


def _image_of(client: docker.DockerClient, base: Base) -> Any | None:
    """The base, if it is on this machine."""
    try:
        return client.images.get(f"{base.image}@{base.digest}" if base.digest else base.name)
    except ImageNotFound:
        return None
