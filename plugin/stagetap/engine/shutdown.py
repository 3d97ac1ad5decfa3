"""An engine that is told to stop: what is in flight gets a bound, and what misses it is named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagetap.engine.configure import uses_stagetap

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from stagetap.engine.scheduler import CommitBarrier

DRAIN_SHARE = 0.8
"""Of vLLM's ``shutdown_timeout``: failing by name comes before the kill at its end."""


def begin_drain(config: VllmConfig, scheduler: CommitBarrier) -> None:
    """The ``engine_shutdown`` hook."""
    if uses_stagetap(config):
        scheduler.begin_drain(DRAIN_SHARE * config.shutdown_timeout)
