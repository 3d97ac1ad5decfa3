"""The ``vllm_config`` hook: refuse what cannot be honoured, choose our worker and scheduler.

Runs in the front end on the finished configuration, seconds after the command and before any
worker starts. A configuration without the StageTap connector is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stagetap.engine.checkpoint import fingerprint_ahead
from stagetap.engine.parallel import check_parallel
from stagetap.engine.refusal import announced
from stagetap.engine.series import check_series
from stagetap.errors import Refused
from stagetap.incompatible import (
    KV_OFFLOADING,
    LORA,
    MICROBATCHES,
    NO_GENERATION,
    OTHER_SCHEDULER,
    OTHER_WORKER,
    SLEEP_MODE,
    SPECULATION,
    WEIGHT_TRANSFER,
    check_features,
)
from stagetap.layer_choice import choose_layers
from stagetap.options import CONNECTOR_NAME, ConnectorOptions, connector_options
from stagetap.partition import engine_stages
from stagetap.stores.base import KnownKind, check_store
from stagetap.taps import validate_layer_ids

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULER = "stagetap.engine.scheduler.TapScheduler"
ASYNC_SCHEDULER = "stagetap.engine.scheduler.TapAsyncScheduler"
WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": "stagetap.engine.workers.cpu.TapWorker",
    "vllm.v1.worker.gpu_worker.Worker": "stagetap.engine.workers.gpu.TapWorker",
}
"""The platform's own worker class, and the class that stands in for it."""


SHUTDOWN_SECONDS = 30
"""How long an engine that is told to stop may finish what is in flight, unless the user says."""


def uses_stagetap(config: VllmConfig) -> bool:
    """Whether this engine's connector is ours."""
    transfer = config.kv_transfer_config
    return transfer is not None and transfer.has_connector(CONNECTOR_NAME)


def _lost_connector(config: VllmConfig) -> bool:
    """Whether vLLM's offloading stands in the place of our connector, with our options left."""
    transfer = config.kv_transfer_config
    if transfer is None or config.cache_config.kv_offloading_size is None:
        return False
    return {"layers", "store"} <= transfer.kv_connector_extra_config.keys()


def options_of(config: VllmConfig) -> ConnectorOptions:
    """The connector options of an engine that uses StageTap.

    Raises:
        Refused: an option is unknown, missing or ill-typed.
    """
    return connector_options(_own_transfer(config)["kv_connector_extra_config"])


def stands_alone(config: VllmConfig) -> bool:
    """Whether ours is the engine's only connector, not one of several in a MultiConnector."""
    return bool(config.kv_transfer_config.kv_connector == CONNECTOR_NAME)


def _own_transfer(config: VllmConfig) -> dict[str, Any]:
    """Our part of ``kv_transfer_config``: ``kv_role`` and ``kv_connector_extra_config``."""
    for one in _transfers(config):
        if one["kv_connector"] == CONNECTOR_NAME:
            return {"kv_connector_extra_config": {}, **one}
    raise Refused(
        f"{CONNECTOR_NAME} is not among the connectors of {config.kv_transfer_config.kv_connector}"
    )


def _transfers(config: VllmConfig) -> list[dict[str, Any]]:
    """The configuration of every connector of this engine."""
    transfer = config.kv_transfer_config
    if not stands_alone(config):
        return list(transfer.kv_connector_extra_config.get("connectors", []))
    return [
        {
            "kv_connector": transfer.kv_connector,
            "kv_role": transfer.kv_role,
            "kv_connector_extra_config": transfer.kv_connector_extra_config,
        }
    ]


def configure(config: VllmConfig) -> None:
    """Check the whole configuration and set ``worker_cls`` and ``scheduler_cls``.

    Raises:
        Refused: see ``docs/requests.md``.
    """
    with announced():
        check_features({KV_OFFLOADING: _lost_connector(config)})
    if not uses_stagetap(config):
        return
    with announced():
        check_series()
        total = config.model_config.get_total_num_hidden_layers()
        _resolve_layers(config, total)
        options = options_of(config)
        _check_engine(config)
        validate_layer_ids(options.layers, total)
        engine_stages(total, config.parallel_config.pipeline_parallel_size)
        # For what it refuses as well: nothing is loaded yet.
        fingerprint = fingerprint_ahead(
            config.model_config.model, str(config.load_config.load_format)
        )
        check_store(
            options.store, KnownKind(layer_ids=options.layers, weights_fingerprint=fingerprint)
        )
        _choose_classes(config)
    if config.shutdown_timeout == 0:
        # Else vLLM kills the engine at once, and with it what is being published.
        config.shutdown_timeout = SHUTDOWN_SECONDS
    # Part of vLLM's compilation hash: code compiled with taps is not code compiled without.
    if isinstance(config.additional_config, dict):
        config.additional_config["stagetap_layers"] = list(options.layers)


def _resolve_layers(config: VllmConfig, num_hidden_layers: int) -> None:
    """Put ids in the place of a choice of layers: every other process is handed ids."""
    extra = _own_transfer(config)["kv_connector_extra_config"]
    if isinstance(extra.get("layers"), str):
        extra["layers"] = list(choose_layers(extra["layers"], num_hidden_layers))


def _check_runner(config: VllmConfig) -> None:
    model = config.model_config
    if model.runner_type == "generate":
        return
    if not model.registry.is_text_generation_model(model.architectures, model):
        raise Refused(
            f"{_released_architecture(config)} generates no text: it is an encoder or an embedding "
            "model; capture takes decoder-only models"
        )
    raise Refused(NO_GENERATION.refused)


def _check_engine(config: VllmConfig) -> None:
    parallel = config.parallel_config
    _check_connectors(config)
    if not config.use_v2_model_runner:
        raise Refused(
            "capture needs vLLM's Model Runner V2; set VLLM_USE_V2_MODEL_RUNNER=1 "
            "(on CPU TRITON_INTERPRET=1 as well)"
        )
    _check_runner(config)
    if config.model_config.is_encoder_decoder:
        raise Refused(
            f"{_released_architecture(config)} has an encoder and a decoder, and its prompt runs "
            "through the former; capture takes decoder-only models"
        )
    check_features(
        {
            SPECULATION: config.speculative_config is not None,
            SLEEP_MODE: config.model_config.enable_sleep_mode,
            WEIGHT_TRANSFER: config.weight_transfer_config is not None,
            LORA: config.lora_config is not None,
            MICROBATCHES: parallel.use_ubatching,
        }
    )
    check_parallel(parallel)


def _released_architecture(config: VllmConfig) -> str:
    """As ``config.json`` names it; vLLM's own word may be that of its wrapper for many models."""
    named = config.model_config.hf_config.architectures or [config.model_config.architecture]
    return str(named[0])


def _check_connectors(config: VllmConfig) -> None:
    own = _own_transfer(config)
    if own.get("kv_role") != "kv_producer":
        raise Refused(
            f"kv_role {own.get('kv_role')} makes no sense for a connector that only publishes; "
            'say "kv_role": "kv_producer"'
        )
    if stands_alone(config):
        return
    outer = config.kv_transfer_config.kv_connector
    if outer != "MultiConnector":
        raise Refused(f"StageTap inside {outer} is unknown ground; use vLLM's MultiConnector")
    first, *others = _transfers(config)
    if first["kv_connector"] != CONNECTOR_NAME:
        raise Refused(
            f"{CONNECTOR_NAME} must be the first of MultiConnector's connectors: only the first "
            "one's facts reach the scheduler at start"
        )
    for other in others:
        if other.get("kv_role") != "kv_producer":
            raise Refused(
                f"{other['kv_connector']} with kv_role {other.get('kv_role')} can bring KV cache "
                "from elsewhere; such tokens run no forward pass here and have no states: give it "
                "kv_role kv_producer, or serve without it"
            )
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    if not MultiConnector.all_children_support_hma(config.kv_transfer_config):
        names = [other["kv_connector"] for other in others]
        raise Refused(
            f"one of {names} cannot handle several KV cache groups (SupportsHMA), and taps are a "
            "group of their own; serve without it"
        )


def _choose_classes(config: VllmConfig) -> None:
    parallel, scheduling = config.parallel_config, config.scheduler_config
    if parallel.worker_cls not in WORKERS.values():
        if parallel.worker_cls not in WORKERS:
            raise Refused(f"worker class {parallel.worker_cls}: {OTHER_WORKER.refused}")
        parallel.worker_cls = WORKERS[parallel.worker_cls]
    ours = ASYNC_SCHEDULER if scheduling.async_scheduling else SCHEDULER
    if scheduling.scheduler_cls not in (None, ours):
        raise Refused(f"scheduler class {scheduling.scheduler_cls}: {OTHER_SCHEDULER.refused}")
    scheduling.scheduler_cls = ours
