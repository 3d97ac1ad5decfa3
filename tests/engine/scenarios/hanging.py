"""A part does not come back: who waits for it, how long, and what it keeps from others."""

from __future__ import annotations

import time
from typing import Any

from engine.driver import Driver
from engine.harness import wait_for
from engine.scenarios import SHORT


def hang(driver: Driver) -> Any:
    """A write hangs: its request fails in time, its pages come back, its slot does not yet."""
    driver.faults({"on": "write", "do": "hang", "stage": 1, "sample": "hung"})
    ended = driver.run(SHORT, "hung")
    driver.step()
    driver.step()
    held = driver.state()
    others = driver.run(SHORT, "beside-hung")
    driver.faults()
    driver.settle()
    late = "hung" in driver.committed()
    return {
        "ended": ended,
        "held": held,
        "others": others,
        "late": late,
        "retry": driver.run(SHORT, "hung"),
    }


def quarantine(driver: Driver) -> Any:
    """All writers of a stage hang: exporting is suspended until one returns."""
    driver.faults({"on": "write", "do": "hang", "stage": 0})
    names = [driver.submit(SHORT, f"q-{n}") for n in range(2)]
    hung = driver.wait(*names)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:  # ordinary requests make the engine step
        driver.run(SHORT)
    refused = driver.run(SHORT, "q-refused")
    ordinary = driver.run(SHORT)
    driver.faults()
    after = driver.run_until_committed(SHORT, "q-after")
    return {"hung": hung, "refused": refused, "ordinary": ordinary, "after": after}


def hung_commit(driver: Driver) -> Any:
    """A commit that does not return: nobody knows, and nobody is told otherwise."""
    driver.faults({"on": "commit", "do": "hang", "sample": "hung-commit"})
    ended = driver.run(SHORT, "hung-commit")
    again = driver.run(SHORT, "hung-commit")
    driver.faults()
    wait_for(lambda: "hung-commit" in driver.committed())
    return {"ended": ended, "again": again, "third": driver.run(SHORT, "hung-commit")}


def hung_look(driver: Driver) -> Any:
    """The store does not even say whether a sample is there."""
    driver.faults({"on": "look", "do": "hang", "sample": "look-hung"})
    hung = driver.submit(SHORT, "look-hung")
    behind = driver.submit(SHORT, "look-behind")
    twin = driver.run(SHORT, "look-behind")
    beside = driver.run(SHORT)
    still_waiting = not driver.ended.keys() & {hung, behind}
    ended, suspended = driver.wait(hung, behind)
    refused = driver.run(SHORT, "look-refused")
    ordinary = driver.run(SHORT)
    driver.faults()
    after = driver.run_until_committed(SHORT, "look-after")
    return {
        "twin": twin,
        "beside": beside,
        "still_waiting": still_waiting,
        "ended": ended,
        "suspended": suspended,
        "refused": refused,
        "ordinary": ordinary,
        "after": after,
    }


def slow_look(driver: Driver) -> Any:
    """The store says late whether a sample is there: its request waits, and nobody else."""
    committed = driver.run(SHORT, "slow-taken")
    driver.faults({"on": "look", "do": "delay", "seconds": 2.0, "sample": "slow"})
    free = driver.submit(SHORT, "slow-free")
    taken = driver.submit(SHORT, "slow-taken")
    gone = driver.submit(SHORT, "slow-gone")
    beside = driver.run(SHORT)
    still_waiting = not driver.ended.keys() & {free, taken, gone}
    driver.abort(gone)
    return {
        "committed": committed,
        "beside": beside,
        "still_waiting": still_waiting,
        "ends": driver.wait(free, taken),
        "readable": sorted(name for name in driver.committed() if name.startswith("slow-")),
    }
