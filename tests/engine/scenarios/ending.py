"""When a request ends, as its sender sees it: held back, at once, or because the sender left."""

from __future__ import annotations

from typing import Any

from engine.driver import Driver
from engine.harness import random_prompts
from engine.scenarios import SHORT


def completion(driver: Driver) -> Any:
    """`committed` waits for the commit, `accepted` does not."""
    driver.faults({"on": "commit", "do": "delay", "seconds": 1.0})
    found: dict[str, Any] = {}
    for kind in ("accepted", "committed"):
        ended = driver.run(SHORT, f"c-{kind}", completion=kind)
        found[kind] = {"ended": ended, "readable": f"c-{kind}" in driver.committed()}
    driver.until(lambda: not driver.scheduler.has_requests())
    found["afterwards"] = sorted(driver.committed())
    return found


def aborts(driver: Driver) -> Any:
    """Aborted while waiting, preempted, between chunks, while publishing, after the commit."""
    from vllm.v1.request import RequestStatus

    found: dict[str, Any] = {}
    long = random_prompts([100] * 8, seed=5)
    writing = {"max_tokens": 60, "ignore_eos": True}
    # Six prompts fill the cache; the last one to run is the first that vLLM preempts.
    running = [driver.submit(ids, sampling=writing) for ids in long[1:6]]
    preempted = driver.submit(long[0], "a-preempted", sampling=writing, include_output=True)
    waiting = driver.submit(long[6], "a-waiting")
    driver.until(lambda: driver.request(preempted).status == RequestStatus.RUNNING)
    found["waiting"] = driver.request(waiting).status == RequestStatus.WAITING
    driver.abort(waiting)
    driver.until(lambda: driver.request(preempted).status == RequestStatus.PREEMPTED)
    driver.abort(preempted, *running)
    driver.settle()

    chunked = driver.submit(random_prompts([240], seed=6)[0], "a-chunked")
    driver.until(lambda: (r := driver.request(chunked)) and 0 < r.num_computed_tokens < 240)
    driver.abort(chunked)
    driver.settle()

    driver.faults({"on": "write", "do": "delay", "seconds": 1.0})
    publishing = driver.submit(SHORT, "a-publishing")
    driver.until(lambda: driver.scheduler._withheld)
    driver.abort(publishing)
    driver.step()
    driver.step()
    driver.faults()
    driver.settle()

    committed = driver.submit(SHORT, "a-committed")
    driver.wait(committed)
    driver.abort(committed)
    driver.settle()
    found["committed"] = sorted(name for name in driver.committed() if name.startswith("a-"))
    found["ended"] = [name for name in (waiting, preempted, chunked, publishing)
                      if name in driver.ended]  # fmt: skip
    found["retry"] = driver.run(SHORT, "a-publishing")
    return found


def many(driver: Driver) -> Any:
    """Five hundred requests, a third of them aborted on the way."""
    prompts = random_prompts([6] * 500, seed=9)
    sent = [driver.submit(ids, f"many-{n}", prefill_only=True) for n, ids in enumerate(prompts)]
    kept = [name for number, name in enumerate(sent) if number % 3]
    for number, name in enumerate(sent):
        if number % 3 == 0:
            driver.step()
            driver.abort(name)
    ended = driver.wait(*kept, seconds=300)
    return {"states": sorted({str(one.state) for one in ended}), "kept": len(kept)}
