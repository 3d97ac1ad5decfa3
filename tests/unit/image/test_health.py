"""The health check of the image: the command line of the Dockerfile itself, without Docker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from stagetap_image.__main__ import LOCK

DEFAULT = "http://127.0.0.1:8000/health"
DEAD = "http://127.0.0.1:9"


def _command() -> list[str]:
    text = LOCK.with_name("Dockerfile").read_text("utf-8")
    found = re.search(r"^HEALTHCHECK .*\\\n\s+CMD (\[.*\])$", text, re.MULTILINE)
    assert found is not None
    python, *arguments = json.loads(found[1])
    assert python == "python3"
    return [sys.executable, *arguments]


@pytest.fixture
def healthy() -> Iterator[str]:
    """The address of a server that is well at /health and nowhere else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _code(command: list[str], url: str | None) -> int:
    proxies = dict.fromkeys(("http_proxy", "HTTP_PROXY", "ALL_PROXY"), DEAD)
    environment = {**os.environ, **proxies, "STAGETAP_HEALTH_URL": url or ""}
    if url is None:
        del environment["STAGETAP_HEALTH_URL"]
    return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode


def test_a_proxy_is_not_asked(healthy: str) -> None:
    assert _code(_command(), f"{healthy}/health") == 0
    assert _code(_command(), f"{healthy}/other") != 0
    assert _code(_command(), DEAD) != 0


@pytest.mark.parametrize("url", [None, ""])
def test_without_an_address_it_is_that_of_vllm(healthy: str, url: str | None) -> None:
    """The port of the default is the one thing that is replaced: another server may have it."""
    *python, code = _command()
    assert DEFAULT in code
    assert _code([*python, code.replace(DEFAULT, f"{healthy}/health")], url) == 0
    assert _code([*python, code.replace(DEFAULT, f"{healthy}/other")], url) != 0
