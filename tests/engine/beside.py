"""What the tests of StageTap inside vLLM's MultiConnector do in their engine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.driver import Driver, leftovers
from engine.harness import random_prompts
from stagetap import open_dataset


def multi_connector(layers: list[int], store: str, *others: dict[str, Any]) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for StageTap and other connectors."""
    own = {
        "kv_connector": "StageTapConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"layers": layers, "store": store},
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"connectors": [own, *others]},
    }


def connector_part(name: str, **changes: Any) -> dict[str, Any]:
    """One of ``stagetap_connectors``, as a part of a MultiConnector."""
    module = "stagetap_connectors"
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_producer",
        **changes,
    }


def beside_others(model: str, store: str) -> Any:
    """Export beside a producing connector; then meet one that brings KV against its word."""
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    transfer = multi_connector(
        [0, 3, 6], store, connector_part("Producing"), connector_part("Loading")
    )
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model,
            pipeline_parallel_size=2,
            distributed_executor_backend="mp",
            enforce_eager=True,
            skip_tokenizer_init=True,
            block_size=32,
            max_num_batched_tokens=64,
            kv_transfer_config=KVTransferConfig(**transfer),
        )
    )
    driver = Driver(SimpleNamespace(_engine=engine), Path(store), Path(store))  # type: ignore[arg-type]
    prompts = random_prompts([20, 90, 40, 200], seed=11)
    sent = [driver.submit(ids, f"m-{n}") for n, ids in enumerate(prompts)]
    sent.append(driver.submit(prompts[0]))
    aborted = driver.submit(prompts[3], "m-aborted")
    driver.step()
    driver.abort(aborted)
    ended = driver.wait(*sent)
    params = driver.last_params
    driver.settle()
    found: dict[str, Any] = {
        "ended": ended,
        "params": params,
        "left": leftovers(driver.state()),
        "tokens": {n: open_dataset(store)[f"m-{n}"].input_ids.tolist() for n in range(4)},
        "prompts": prompts,
    }
    hit = [77] + random_prompts([99], seed=12)[0]
    running = driver.submit(prompts[3], "m-running", sampling={"max_tokens": 20})
    driver.step()
    found["hit"] = driver.run(hit, "m-hit")
    (found["running"],) = driver.wait(running)
    found["later"] = driver.run(prompts[1], "m-later")
    found["ordinary"] = driver.run(hit)
    driver.settle()
    found["left_at_the_end"] = leftovers(driver.state())
    found["readable"] = sorted(driver.committed())
    engine.engine_core.shutdown()
    return json.loads(json.dumps(found, default=asdict))
