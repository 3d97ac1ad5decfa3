"""At start: what all workers said must agree; from it follows who owns what and what was tapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.logger import init_logger

from stagetap.engine.messages import WorkerFacts
from stagetap.engine.series import check_series
from stagetap.errors import Refused
from stagetap.manifest import Tapped
from stagetap.plan.balance import better_partition, engine_balance
from stagetap.stores.base import Invariant
from stagetap.stores.kind import kind_of
from stagetap.taps import (
    ID_CONVENTION,
    NORM_STATE,
    StageTaps,
    check_ownership,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

    from stagetap.options import ConnectorOptions

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name


@dataclass(frozen=True)
class Agreement:
    """What holds for the whole run.

    Attributes:
        owners: what the first rank of every owning stage said, by stage, ascending.
        stages: the layers and taps of every stage.
        tapped: goes into every manifest.
        invariant: what the store must hold, or be empty.
    """

    owners: Mapping[int, WorkerFacts]
    stages: tuple[StageTaps, ...]
    tapped: Tapped
    invariant: Invariant


def agree(
    config: VllmConfig,
    options: ConnectorOptions,
    fingerprint: str,
    nonce: str,
    metadata: Mapping[tuple[int, int], KVConnectorHandshakeMetadata],
) -> Agreement:
    """Compare what all workers said and derive who owns what.

    Args:
        fingerprint: of the checkpoint, as the scheduler sees it.
        nonce: what the scheduler left in the store.
        metadata: by (stage, tensor-parallel rank).

    Raises:
        Refused: workers differ, a tap has no owner or two, or a worker's store is another one.
    """
    facts: dict[tuple[int, int], WorkerFacts] = {}
    for rank, said in metadata.items():
        if not isinstance(said, WorkerFacts):
            raise Refused(f"worker {rank} is not StageTap's: it said {type(said).__name__}")
        facts[rank] = said
    _check_equal(facts, fingerprint, nonce, options.store)
    total = config.model_config.get_total_num_hidden_layers()
    stages = check_ownership(
        options.layers, total, {rank: fact.taps for rank, fact in facts.items()}
    )
    first = next(iter(facts.values()))
    _say_better_partition(facts, options.layers, first.stream)
    tapped = _describe(config, options, fingerprint, first, stages, total)
    return Agreement(
        owners={
            stage: fact
            for (stage, rank), fact in sorted(facts.items())
            if rank == 0 and fact.cache_group is not None
        },
        stages=stages,
        tapped=tapped,
        invariant=kind_of(tapped),
    )


def _say_better_partition(
    facts: Mapping[tuple[int, int], WorkerFacts], layer_ids: Sequence[int], stream: str
) -> None:
    """Log which partition would hold more KV blocks than this one, if one is worth a restart."""
    stages = [
        [fact.budget for (stage, _), fact in sorted(facts.items()) if stage == number]
        for number in range(1 + max(stage for stage, _ in facts))
    ]
    balance = engine_balance(stages, layer_ids, stream)
    if balance is not None and (advice := better_partition(balance)) is not None:
        logger.info("stagetap: %s", advice.line())


def _check_equal(
    facts: Mapping[tuple[int, int], WorkerFacts], fingerprint: str, nonce: str, store: str
) -> None:
    first = next(iter(facts.values()))
    expected = {
        "weights_fingerprint": fingerprint,
        "series_digest": check_series(),
        "dtype": first.dtype,
        "hidden_size": first.hidden_size,
        "stream": first.stream,
    }
    for (stage, rank), fact in facts.items():
        for name, value in expected.items():
            if getattr(fact, name) != value:
                raise Refused(
                    f"stage {stage}, tensor-parallel rank {rank} has {name} "
                    f"{getattr(fact, name)}, the scheduler {value}; every node needs the "
                    "same checkpoint and the same StageTap"
                )
        if nonce not in fact.nonces:
            raise Refused(
                f"stage {stage}, tensor-parallel rank {rank} does not see what the scheduler "
                f"wrote to {store}; give a directory that all nodes share"
            )


def _describe(
    config: VllmConfig,
    options: ConnectorOptions,
    fingerprint: str,
    fact: WorkerFacts,
    stages: tuple[StageTaps, ...],
    total: int,
) -> Tapped:
    parallel = config.parallel_config
    return Tapped(
        model=config.model_config.model,
        weights_fingerprint=fingerprint,
        weight_version="initial",
        adapter=None,
        stream=fact.stream,
        norm_state=NORM_STATE,
        id_convention=ID_CONVENTION,
        layer_ids=options.layers,
        num_hidden_layers=total,
        hidden_size=fact.hidden_size,
        vllm_version=vllm.__version__,
        series_digest=fact.series_digest,
        pp_size=parallel.pipeline_parallel_size,
        tp_size=parallel.tensor_parallel_size,
        pp_layers=tuple((taps.start, taps.end) for taps in stages),
        kv_cache_dtype=config.cache_config.cache_dtype,
        dtype=fact.dtype,
        engine_args=deciding_args(config),
    )


def deciding_args(config: VllmConfig) -> dict[str, str]:
    """Arguments that change what a model computes, beside its weights and its dtype.

    Args:
        config: the engine's.

    Returns:
        By name, as text; without those that leave it to the model.
    """
    model = config.model_config
    given = {
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "model_impl": model.model_impl,
        "quantization": model.quantization,
        "hf_overrides": _as_text(model.hf_overrides),
    }
    return {name: str(value) for name, value in given.items() if value not in (None, "auto")}


def _as_text(overrides: dict[str, Any] | Callable[..., Any] | None) -> str | None:
    """The same in each process that was given the same; None for nothing."""
    if callable(overrides):
        return f"{overrides.__module__}.{overrides.__qualname__}"
    return json.dumps(overrides, sort_keys=True, default=str) if overrides else None
