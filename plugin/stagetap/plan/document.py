"""A plan in terms that JSON can hold. All sizes are in bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from stagetap.plan.stages import Plan, Stage
from stagetap.taps import ID_CONVENTION, role_of

REMARKS = (
    "memory for activations, CUDA graphs and communication is not told by shapes; a budget "
    "reserves what --reserve-gib says for it",
    "weights that a backend pads or repacks when they are loaded may take more",
)
HYBRID_REMARK = (
    "layers with windows or states share vLLM's pages with the others; rounding to whole pages is "
    "not counted"
)


def remarks(plan: Plan) -> tuple[str, ...]:
    """What is estimated in a plan, or left out of it."""
    hybrid = any(stage.window_bytes or stage.state_bytes for stage in plan.stages)
    return (*plan.model.remarks, *REMARKS, *((HYBRID_REMARK,) if hybrid else ()))


def plan_document(plan: Plan, name: str) -> dict[str, Any]:
    """Everything that a plan says."""
    model, total = plan.model, plan.model.num_hidden_layers
    return {
        "model": name,
        "model_type": model.model_type,
        "num_hidden_layers": total,
        "hidden_size": model.hidden_size,
        "parameters": model.parameters(),
        "dtype": model.dtype,
        "quantization": model.quantization.method,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "layer_ids": list(plan.layer_ids),
        "stream": plan.stream,
        "roles": {str(layer): role_of(layer, total) for layer in plan.layer_ids},
        "id_convention": ID_CONVENTION,
        "pp": plan.parallel.pp,
        "tp": plan.parallel.tp,
        "expert_parallel": plan.parallel.expert_parallel,
        "partition": list(plan.partition),
        "sequence_tokens": plan.sequence_tokens,
        "batched_tokens": plan.batched_tokens,
        "stored_bytes_per_1000_tokens": 1000 * plan.stored_token_bytes,
        "relay_bytes_per_token": plan.relay_token_bytes,
        "budget": None if plan.budget is None else asdict(plan.budget),
        "kv_tokens": plan.tokens,
        "fits": plan.fits,
        "advice": None
        if plan.advice is None
        else asdict(plan.advice) | {"line": plan.advice.line()},
        "advice_without_taps": plan.advice_without_taps,
        "remarks": list(remarks(plan)),
        "stages": [_stage_document(stage) for stage in plan.stages],
    }


def _stage_document(stage: Stage) -> dict[str, Any]:
    document = asdict(stage)
    document["stage"] = document.pop("index")
    document["layers"] = [document.pop("start"), document.pop("end")]
    document["layer_ids"] = list(stage.layer_ids)
    document["fixed_bytes"] = stage.fixed_bytes
    return document
