"""Hooks that a stage's self-check must refuse, tried in the workers of one engine start."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stagetap.engine.capture.decoder import Decoder
    from stagetap.engine.capture.self_check import TapPlan

WAYS = ("nothing", "swap", "drop_residual", "shift_index", "remove")


def on_second_stage(model: str) -> dict[str, list[str | None]]:
    """By kind of sabotage: what the self-check of each stage refuses; None where it takes all."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from stagetap.engine import rehearsal

    os.environ.update(rehearsal.engine_environment(2, 1))
    arguments = {
        "model": model,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
    }
    with tempfile.TemporaryDirectory() as store:
        workers = rehearsal._start_workers(arguments, [1, 4], store)
        try:
            return {way: workers.collective_rpc(try_on_worker, args=(way,)) for way in WAYS}
        finally:
            workers.shutdown()


def try_on_worker(worker: Any, way: str) -> str | None:
    """In a worker: choose this stage's hooks, change them, and ask the self-check."""
    from vllm.distributed.parallel_state import get_pp_group

    from stagetap.engine.capture import TapCache, hook, self_check
    from stagetap.errors import Refused
    from stagetap.taps import StageTaps

    stage = get_pp_group().rank_in_group
    model = worker.model_runner.get_model()
    decoder, check = self_check(model, worker.vllm_config, worker._run_dummy_tokens)
    ids = tuple(range(decoder.start + 1, decoder.end + 1))
    plans = check.choose(ids)
    if stage == 1:
        plans = changed(plans, decoder, way)
    taps = StageTaps(decoder.start, decoder.end, ids)
    cache = TapCache(worker.vllm_config, taps)
    handles = hook(plans, cache)
    if stage == 1 and way == "remove":
        handles[1].remove()
    try:
        check.prove(plans, cache)
    except Refused as refused:
        return str(refused)
    finally:
        for handle in handles:
            handle.remove()
    return None


def changed(plans: list[TapPlan], decoder: Decoder, way: str) -> list[TapPlan]:
    """The plans of one stage, the layer ids unchanged and what they read made wrong."""
    first, second, third = plans
    if way == "swap":
        return [
            replace(first, site=second.site, parts=second.parts),
            replace(second, site=first.site, parts=first.parts),
            third,
        ]
    if way == "drop_residual":
        return [replace(first, parts=first.parts[:1]), second, third]
    if way == "shift_index":
        # As a loop does that counts its layers from 0 on every stage.
        index = third.layer_id - decoder.start
        site = replace(first.site, path=decoder.path_of(index), module=decoder.layers[index])
        return [first, second, replace(third, site=site, parts=first.parts)]
    return plans
