"""A daemon, the bases and the images, made once; and a table of what was built at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from image.bases import cpu_base, cuda_base
from image.daemon import OPT_OUT, NeedsRoot, NoDaemon, cache_folder, running_daemon
from image.report import REPORT
from stagetap_image.bases import Base
from stagetap_image.build import Built, build_image


def asked_for(config: pytest.Config) -> bool:
    """Whether these tests were asked for by name, and not along with all others."""
    return config.getoption("markexpr") == "image"


@pytest.fixture(scope="session")
def client(request: pytest.FixtureRequest) -> Iterator[docker.DockerClient]:
    if reason := os.environ.get(OPT_OUT):
        REPORT["not run"] = f"{OPT_OUT}={reason}"
        pytest.skip(f"{OPT_OUT}={reason}")
    try:
        with running_daemon(cache_folder()) as client:
            yield client
    except NoDaemon as error:
        if isinstance(error, NeedsRoot) and not asked_for(request.config):
            REPORT["not run"] = str(error)
            pytest.skip(f"{error}; CI runs it")
        pytest.fail(
            f"{error}; or set {OPT_OUT} to the reason why they shall not run", pytrace=False
        )


@pytest.fixture(scope="session")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("image") / "log"


@pytest.fixture(scope="session")
def base(client: docker.DockerClient) -> Base:
    return cpu_base(client, print)


@pytest.fixture(scope="session")
def bare_base(client: docker.DockerClient) -> Base:
    return cuda_base(client, print)


@pytest.fixture(scope="session")
def image(client: docker.DockerClient, base: Base) -> Built:
    built = build_image(client, "cpu", base, tag="stagetap-test:cpu", network="host", log=print)
    REPORT.update({f"cpu {name}": found for name, found in built.report().items()})
    return built


@pytest.fixture(scope="session")
def cuda_image(client: docker.DockerClient, bare_base: Base) -> Built:
    """Without the last step's part that loads torch: the stand-in has none."""
    built = build_image(
        client,
        "cuda",
        bare_base,
        tag="stagetap-test:cuda",
        network="host",
        log=print,
        extra_arguments={"DOCTOR": "--static"},
    )
    found = built.report() | {"doctor": "well, as far as files tell"}
    REPORT.update({f"cuda {name}": value for name, value in found.items()})
    return built


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if REPORT:
        terminalreporter.section("image")
        for name, found in REPORT.items():
            terminalreporter.write_line(f"{name:<18} {found}")
