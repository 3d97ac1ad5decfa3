"""What ``test_plan`` does inside an engine's processes: reading vLLM's own accounting."""

from __future__ import annotations

import copy
from typing import Any

from stagetap.engine.session import CaptureSession

KV_CACHE_SCALES = tuple(f".{one}_{what}" for one in "qkv" for what in ("scale", "zero_point"))


def accounting(session: CaptureSession) -> list[dict[str, Any]]:
    """What every worker says of its memory, in order of the ranks."""
    return session._engine.collective_rpc(worker_accounting)


def worker_accounting(worker: Any) -> dict[str, Any]:
    """In a worker: bytes of its parameters, and of one token in each of its cache layers."""
    from stagetap.engine.budget import measured_budget
    from stagetap.engine.capture import installed_capture

    specs = worker.model_runner.get_kv_cache_spec()
    cache = installed_capture(worker.vllm_config).cache
    taps = () if cache is None else cache.layer_names
    per_token = {name: spec.page_size_bytes / spec.block_size for name, spec in specs.items()}
    budget = measured_budget(
        worker.vllm_config, worker.model_runner.get_model(), specs, available_bytes=0
    )
    assert budget is not None
    (block_size,) = {spec.block_size for spec in specs.values()}
    return {
        "rank": worker.rank,
        "weight_bytes": _parameter_bytes(worker.vllm_config),
        "kv_token_bytes": sum(size for name, size in per_token.items() if name not in taps),
        "tap_token_bytes": sum(per_token[name] for name in taps),
        "capture_bytes": 0 if cache is None else cache.buffer.nbytes,
        "layer_ids": [] if cache is None else list(cache.taps.layer_ids),
        "batched_tokens": worker.vllm_config.scheduler_config.max_num_batched_tokens,
        # What the advice about partitions rests on, per token.
        "budget_layers": [size / block_size for size in budget.layer_block_bytes],
        "budget_tap": budget.tap_block_bytes / block_size,
    }


def module_bytes(folders: dict[str, str]) -> dict[str, int]:
    """Bytes of the parameters of whole models, by name, as vLLM allocates them for loading."""
    import os

    from stagetap.engine.environment import engine_environment

    os.environ.update(engine_environment(1, 1))
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.utils.network_utils import get_open_port

    found: dict[str, int] = {}
    for name, folder in folders.items():
        config = EngineArgs(
            model=folder, enforce_eager=True, skip_tokenizer_init=True
        ).create_engine_config()
        if not found:
            with set_current_vllm_config(config):
                address = f"tcp://127.0.0.1:{get_open_port()}"
                init_distributed_environment(1, 0, address, 0, backend="gloo")
                initialize_model_parallel(1, 1)
        found[name] = _parameter_bytes(config)
    return found


def _parameter_bytes(vllm_config: Any) -> int:
    """Bytes of this rank's parameters as vLLM allocates them for loading.

    The CPU backend packs linear weights when they are loaded and leaves empty parameters behind, so
    the rank's module tree is built once more, on the meta device. Scales of a quantized KV cache,
    a few bytes a layer, are no weights.
    """
    import torch
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}  # layer names are taken in the other one
    with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
        model = initialize_model(config)
    return sum(
        one.numel() * one.element_size()
        for name, one in model.named_parameters()
        if not name.endswith(KV_CACHE_SCALES)
    )
