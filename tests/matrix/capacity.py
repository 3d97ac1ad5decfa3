"""What capture costs of the KV cache, measured at the start of an engine with it and without it.

A tap is ``hidden_size`` numbers a token, and no more may be charged for it. In models with several
kinds of attention groups of layers share blocks of one size: there a tap cache can cost many times
its bytes, and only the capacity that is left at the end tells.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.harness import Arm
from stagetap.engine.environment import engine_environment
from stagetap.partition import owners, stage_layers

MAX_LEN = 16384
"""Tokens of the request that capacity is counted in: long, so that no block is rounded up much."""

MEMORY_BYTES = 1024**3
"""What every worker has for its caches: on CPU, VLLM_CPU_KVCACHE_SPACE alone says that."""

ITEM_BYTES = 2  # of bfloat16


@dataclass(frozen=True)
class Capacity:
    """Tokens that fit the same memory with capture and without, in requests of ``MAX_LEN``.

    Attributes:
        tap_bytes: of one token, on the stage that owns most.
    """

    tokens_without: int
    tokens_with: int
    tap_bytes: int

    @property
    def share(self) -> float:
        """What capture leaves."""
        return self.tokens_with / self.tokens_without

    @property
    def arithmetic_share(self) -> float:
        """What it would leave if a tap cost its bytes and nothing else."""
        kv_bytes = MEMORY_BYTES / self.tokens_without  # of one token, on the fullest stage
        return kv_bytes / (kv_bytes + self.tap_bytes)

    @property
    def overcharge(self) -> float:
        """How far the share is below the arithmetic one, as a part of that."""
        return 1 - self.share / self.arithmetic_share


def measure(
    checkpoint: Path, layers: Sequence[int], pp: int, store: Path, prefix_cache: bool
) -> Capacity:
    """Start an engine with capture and one without, and ask both.

    Args:
        checkpoint: of a model that takes :data:`MAX_LEN` tokens.
        layers: asked ids.
        pp: pipeline stages.
        store: a folder that can be made.
        prefix_cache: whether the engines have one.
    """
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    engine_args = {
        "max_model_len": MAX_LEN,
        "max_num_seqs": 4,
        "enable_prefix_caching": prefix_cache,
        "skip_tokenizer_init": True,
    }
    session = {
        "model": str(checkpoint),
        "layers": list(layers),
        "store": str(store),
        "pp": pp,
        "engine_args": engine_args,
    }
    plain = {"model": str(checkpoint), "pp": pp, "engine_args": engine_args}
    owned = owners(stage_layers(config["num_hidden_layers"], pp), layers)
    taps = max(len(ids) for ids in owned.values())
    return Capacity(
        tokens_without=Arm("matrix.capacity:tokens_without_capture", None, plain).run(),
        tokens_with=Arm("matrix.capacity:tokens_with_capture", session).run(),
        tap_bytes=taps * config["hidden_size"] * ITEM_BYTES,
    )


def tokens_with_capture(session: Any) -> int:
    """Job in a child: what the started engine has room for."""
    return _tokens(session._engine)


def tokens_without_capture(model: str, pp: int, engine_args: dict[str, Any]) -> int:
    """Job in a child: what an engine without StageTap has room for."""
    os.environ.update(engine_environment(pp, 1))
    assert int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) * 1024**3 == MEMORY_BYTES
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if pp > 1:
        engine_args = {"distributed_executor_backend": "mp", **engine_args}
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=model, pipeline_parallel_size=pp, enforce_eager=True, **engine_args)
    )
    try:
        return _tokens(engine)
    finally:
        engine.engine_core.shutdown()


def _tokens(engine: Any) -> int:
    return int(engine.vllm_config.cache_config.kv_cache_size_tokens)
