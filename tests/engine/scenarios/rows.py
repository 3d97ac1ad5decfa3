"""The rows are right however a request is run: preempted, cut short, or beside others."""

from __future__ import annotations

from typing import Any

import torch

from engine.distance import relative_error
from engine.driver import Driver
from engine.harness import random_prompts
from engine.scenarios import SHORT
from stagetap import open_dataset


def preemption(driver: Driver) -> Any:
    """Long requests in a cache too small for all of them: one right sample each."""
    prompts = random_prompts([100] * 8, seed=7)
    writing = {"max_tokens": 120, "ignore_eos": True}
    names = [f"p-{n}" for n in range(8)]
    sent = [
        driver.submit(ids, name, sampling=writing, include_output=True)
        for ids, name in zip(prompts, names, strict=True)
    ]
    preempted: set[str] = set()

    def all_done() -> bool:
        for name in sent:
            if (request := driver.request(name)) is not None and request.num_preemptions:
                preempted.add(name)
        return all(name in driver.ended for name in sent)

    driver.until(all_done, 180)
    for name, one in zip(names, sent, strict=True):
        assert driver.ended[one].state == "committed", (name, driver.ended[one].said)
    dataset = open_dataset(driver.store, verify=True)
    references = {}
    for name, ids, one in zip(names, prompts, sent, strict=True):
        whole = ids + driver.ended[one].tokens[:-1]
        assert dataset[name].input_ids.tolist() == whole, name
        driver.engine.reset_prefix_cache()  # else it would read what the request itself wrote
        driver.run(whole, f"ref-{name}")
    dataset.refresh()
    for name in names:
        references[name] = dataset[f"ref-{name}"].hidden_states
    errors = {
        name: {
            other: relative_error(dataset[name].hidden_states, reference)
            for other, reference in references.items()
        }
        for name in names
    }
    return {"preempted": len(preempted), "errors": errors}


def prefill_only(driver: Driver) -> Any:
    """Requests that only want their states: no logits, no token, the same rows."""
    from stagetap_faults import count_logits, logits_computed

    driver.engine.collective_rpc(count_logits)
    prompts = random_prompts([1, 7, 33, 130, 240], seed=8)
    driver.engine.reset_prefix_cache()
    references = [driver.run(ids, f"po-ref-{n}") for n, ids in enumerate(prompts)]
    before = driver.engine.collective_rpc(logits_computed)[-1]
    driver.engine.reset_prefix_cache()
    alone = [driver.run(ids, f"po-{n}", prefill_only=True) for n, ids in enumerate(prompts)]
    again = [
        driver.run(ids, f"po-again-{n}", prefill_only=True, sampling={"max_tokens": 50})
        for n, ids in enumerate(prompts)
    ]
    together = driver.wait(
        *(driver.submit(ids, f"po-all-{n}", prefill_only=True) for n, ids in enumerate(prompts))
    )
    logits = driver.engine.collective_rpc(logits_computed)[-1] - before
    writing = {"max_tokens": 30, "ignore_eos": True}
    wanted = driver.run(SHORT, sampling=writing).tokens
    generating = driver.submit(SHORT, sampling=writing)
    driver.step()
    mixed = [driver.submit(ids, f"po-mix-{n}", prefill_only=True) for n, ids in enumerate(prompts)]
    generated, *mixed_ended = driver.wait(generating, *mixed)
    for one in (*references, *alone, *again, *together, *mixed_ended):
        assert one.state == "committed", one
    dataset = open_dataset(driver.store, verify=True)

    def same(kind: str) -> list[bool]:
        return [
            torch.equal(
                dataset[f"po-{kind}{n}"].hidden_states, dataset[f"po-ref-{n}"].hidden_states
            )
            for n in range(len(prompts))
        ]

    def near(kind: str) -> float:
        return max(
            relative_error(
                dataset[f"po-{kind}{n}"].hidden_states,
                dataset[f"po-ref-{n}"].hidden_states,
            )
            for n in range(len(prompts))
        )

    return {
        "references": references,
        "ends": [*alone, *again, *together, *mixed_ended],
        "logits": logits,
        "same": same(""),
        "near": {kind: near(kind) for kind in ("again-", "all-", "mix-")},
        "rows": [dataset[f"po-mix-{n}"].manifest.token_count for n in range(len(prompts))],
        "generated_as_alone": generated.tokens == wanted,
    }
