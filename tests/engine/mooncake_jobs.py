"""What the tests of the Mooncake store do in a process with an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from engine.harness import TESTS, clean_environment
from engine.jobs import capture
from stagetap.engine.session import CaptureSession


def capture_and_consume(
    session: CaptureSession, prompts: dict[str, list[int]], uri: str, reference: str
) -> dict[str, Any]:
    """Capture while a trainer consumes, each sample twice: once consumed an id is free again."""
    found: dict[str, Any] = {
        "rounds": [],
        "from_pages": session._engine.collective_rpc(stores_from_pages),
    }
    for in_flight in (1, 4):
        consumer = subprocess.Popen(
            [
                *(sys.executable, "-m", "engine.mooncake_consumer"),
                *(uri, reference, str(len(prompts))),
            ],
            cwd=TESTS,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        errors = capture(session, prompts, in_flight)
        said, _ = consumer.communicate(timeout=120)
        found["rounds"].append({"errors": errors, **json.loads(said)})
    name, ids = next(iter(prompts.items()))
    found["first"] = capture(session, {name: ids}, in_flight=1)
    found["again"] = capture(session, {name: ids}, in_flight=1)
    return found


def stores_from_pages(worker: Any) -> bool:
    """In a worker: whether its rows are stored from where they are."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from stagetap.engine.connector import stagetap_connector

    return stagetap_connector(get_kv_transfer_group()).worker_side._stores_from_pages
