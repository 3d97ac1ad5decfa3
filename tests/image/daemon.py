"""A Docker daemon of our own: from Debian's packages, with its own data and no networks."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.errors import DockerException

OPT_OUT = "STAGETAP_NO_IMAGE_TESTS"
"""Set to a reason, the tests of the image are skipped, and say it."""

CACHE_VARIABLE = "STAGETAP_IMAGE_CACHE"
"""The folder for the daemon's data, base images included."""

PROGRAMS = {"dockerd": "docker.io", "debootstrap": "debootstrap"}
_START_SECONDS = 60.0


class NoDaemon(Exception):
    """Why no daemon can be had here."""


class NeedsRoot(NoDaemon):
    """This user could not start one anywhere."""


def cache_folder() -> Path:
    """Kept between runs: a base image takes minutes to make."""
    default = Path(tempfile.gettempdir()) / "stagetap-image"
    return Path(os.environ.get(CACHE_VARIABLE) or default)


@contextmanager
def running_daemon(folder: Path) -> Iterator[docker.DockerClient]:
    """A client of a daemon whose data is in ``folder``, and which ends with the context.

    Raises NoDaemon with its last words when it does not come up.
    """
    if os.geteuid() != 0:
        raise NeedsRoot("dockerd and debootstrap need root")
    install(PROGRAMS)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="stagetap-dockerd-") as state:
        socket = f"unix://{state}/docker.sock"
        command = ["dockerd", "--host", socket, "--data-root", str(folder / "docker")]
        command += ["--exec-root", f"{state}/exec", "--pidfile", f"{state}/docker.pid"]
        # Containers use the host's network: a bridge needs rights that few machines give.
        command += ["--storage-driver", "overlay2", "--iptables=false", "--bridge=none"]
        log = Path(state, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield _connected(socket, process, log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for namespace in Path(state, "exec", "netns").glob("*"):
                subprocess.run(["umount", str(namespace)], check=False)  # the daemon leaves these


def _connected(socket: str, process: subprocess.Popen[bytes], log: Path) -> docker.DockerClient:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            client = docker.DockerClient(socket, timeout=900)
            client.ping()
        except DockerException:
            if process.poll() is not None or time.monotonic() > deadline:
                words = log.read_text("utf-8", "replace").strip().splitlines()[-3:]
                raise NoDaemon(f"dockerd does not come up: {' / '.join(words)}") from None
            time.sleep(0.2)
        else:
            return client


def install(programs: Mapping[str, str]) -> None:
    """Debian's packages of those programs that are missing, when this is root on Debian.

    Raises NoDaemon, naming the packages, for programs that cannot be had.
    """
    missing = {package for name, package in programs.items() if shutil.which(name) is None}
    if missing and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *missing]
        for command in (["apt-get", "-qq", "update"], packages):
            subprocess.run(
                command,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
            )
        missing = {package for name, package in programs.items() if shutil.which(name) is None}
    if missing:
        raise NoDaemon(f"apt-get install {' '.join(sorted(missing))} is needed, as root")
