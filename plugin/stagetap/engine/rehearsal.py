"""The start-up self-check alone: workers load the model, prove the capture, and end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagetap.engine.environment import engine_environment
from stagetap.engine.report import engine_report
from stagetap.engine.scratch import scratch_folder
from stagetap.engine.session import engine_arguments, starting

if TYPE_CHECKING:
    from stagetap.engine.capture.self_check import Verdict


def rehearse(
    model: str,
    *,
    layers: str | Sequence[int] | None,
    pp: int,
    tp: int = 1,
    engine_args: dict[str, Any] | None = None,
) -> list[Verdict]:
    """Start the workers of an engine with dummy weights, and say what their self-check has proven.

    No cache is made and no prompt runs. Weights are read when ``engine_args`` names a load format.

    Args:
        model: a checkpoint folder; its config.json is enough.
        layers: ids, or a choice as :mod:`stagetap.layer_choice` has them; None means every id.
        pp: pipeline stages.
        tp: tensor-parallel ranks of each stage.
        engine_args: further arguments of vLLM's ``EngineArgs``.

    Returns:
        One verdict for each tap, by layer id.

    Raises:
        Refused: the configuration or the self-check of a stage refuses.
        StageTapError: vLLM did not get so far.
    """
    os.environ.update(engine_environment(pp, tp))
    without = {"load_format": "dummy", "skip_tokenizer_init": True}
    arguments = engine_arguments(model, pp, tp, {**without, **(engine_args or {})})
    with scratch_folder() as store, engine_report() as report, starting(report):
        workers = _start_workers(arguments, layers, str(store))
        try:
            found: list[list[Verdict]] = workers.collective_rpc("stagetap_verdicts")
        finally:
            workers.shutdown()
    return sorted(
        {verdict.layer_id: verdict for stage in found for verdict in stage}.values(),
        key=lambda verdict: verdict.layer_id,
    )


def _start_workers(
    arguments: dict[str, Any], layers: str | Sequence[int] | None, store: str
) -> Any:
    from vllm import EngineArgs
    from vllm.v1.executor import Executor

    from stagetap.engine.flags import kv_transfer_config

    if layers is None:
        total = EngineArgs(**arguments).create_model_config().get_total_num_hidden_layers()
        layers = range(total + 1)
    transfer = kv_transfer_config(layers, store)
    config = EngineArgs(**arguments, kv_transfer_config=transfer).create_engine_config()
    return Executor.get_class(config)(config)
