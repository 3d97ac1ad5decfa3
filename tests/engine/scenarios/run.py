"""The job that runs scenarios by name."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.driver import Driver, leftovers
from engine.scenarios.ending import aborts, completion, many
from engine.scenarios.failing import breaker, every_third, failure, nonfinite
from engine.scenarios.hanging import hang, hung_commit, hung_look, quarantine, slow_look
from engine.scenarios.rows import preemption, prefill_only
from stagetap.engine.session import CaptureSession

SCENARIOS: dict[str, Callable[[Driver], Any]] = {
    function.__name__: function
    for function in (
        completion,
        aborts,
        many,
        failure,
        every_third,
        breaker,
        nonfinite,
        hang,
        quarantine,
        hung_commit,
        hung_look,
        slow_look,
        preemption,
        prefill_only,
    )
}


def all_scenarios(session: CaptureSession, store: str, fault_file: str, names: list[str]) -> Any:
    """Run scenarios one after the other; name -> what it saw, with what it left behind."""
    driver = Driver(session, Path(store), Path(fault_file))
    seen: dict[str, Any] = {}
    for name in names:
        try:
            seen[name] = SCENARIOS[name](driver)
            driver.faults()
            driver.settle()
            seen[name]["left"] = leftovers(driver.state())
        except Exception:  # noqa: BLE001 -- the test of this scenario shows it
            seen[name] = {"broken": traceback.format_exc()}
            driver.faults()
    return json.loads(json.dumps(seen, default=asdict))
