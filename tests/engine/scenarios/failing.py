"""A part fails at once: who fails with it, who does not, and what follows from many."""

from __future__ import annotations

import time
from typing import Any

from engine.driver import Driver
from engine.harness import random_prompts
from engine.scenarios import SHORT
from stagetap.engine.session import Prompt

FAILURES = (
    ("open", "raise", 0),
    ("write", "fail", 0),
    ("write", "raise", 1),
    ("finish", "fail", 1),
    ("commit", "fail", None),
    ("commit", "raise", None),
)


def failure(driver: Driver) -> Any:
    """A part fails: that request alone, with its cause; a retry succeeds."""
    found = {}
    for on, do, stage in FAILURES:
        name = f"f-{on}-{do}"
        fault = {"on": on, "do": do, "sample": name} | ({} if stage is None else {"stage": stage})
        driver.faults(fault)
        ordinary = driver.submit(SHORT)
        failing = driver.submit(SHORT, name)
        ended, beside = driver.wait(failing, ordinary)
        readable = name in driver.committed()
        driver.faults()
        retry = driver.run(SHORT, name)
        found[name] = {
            "ended": ended,
            "beside": beside,
            "readable": readable,
            "retry": retry,
            "retry_readable": name in driver.committed(),
        }
    return found


def every_third(driver: Driver) -> Any:
    """Every third write of a stage fails."""
    driver.faults({"on": "open", "do": "fail", "stage": 1, "every": 3})
    names = [f"third-{n}" for n in range(9)]
    prompts = random_prompts([70] * 9, seed=2)
    ended = driver.wait(*map(driver.submit, prompts, names))
    committed = driver.committed()
    driver.settle()  # pages come back with the report of the last stage, a step after the answer
    return {
        "states": [one.state for one in ended],
        "agree": all((one.state == "committed") == (name in committed)
                     for name, one in zip(names, ended, strict=True)),
        "used_blocks": driver.used_blocks(),
    }  # fmt: skip


def breaker(driver: Driver) -> Any:
    """Three failures in a row open the breaker; a probe closes it."""
    driver.faults({"on": "write", "do": "fail", "stage": 0})
    failed = [driver.run(SHORT, f"b-{n}") for n in range(2)]
    (captured,) = driver.session.capture([Prompt(SHORT, "b-2")])
    refused = driver.run(SHORT, "b-refused")
    (left_over,) = driver.session.capture([Prompt(SHORT, "b-left-over")])
    ordinary = driver.run(SHORT)
    driver.faults()
    still = driver.run(SHORT, "b-still")
    time.sleep(5.2)
    probe = driver.submit(SHORT, "b-probe")
    beside = driver.submit(SHORT, "b-beside")
    probed, turned_away = driver.wait(probe, beside)
    return {
        "failed": failed,
        "captured": captured,
        "left_over": left_over,
        "refused": refused,
        "ordinary": ordinary,
        "still": still,
        "probe": probed,
        "beside": turned_away,
        "after": driver.run(SHORT, "b-after"),
    }


def nonfinite(driver: Driver) -> Any:
    """A NaN in a tap fails the sample, by name."""
    from stagetap_faults import heal_stage, spoil_stage

    driver.engine.collective_rpc(spoil_stage, args=(0, float("nan")))
    spoilt = driver.run(random_prompts([90], seed=3)[0], "nan")
    driver.engine.collective_rpc(heal_stage)
    return {
        "spoilt": spoilt,
        "readable": "nan" in driver.committed(),
        "healed": driver.run(random_prompts([90], seed=4)[0], "nan"),
    }
