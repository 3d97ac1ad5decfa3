"""From the forward pass into this stage's tap cache.

Every stage owns one tap cache, paged like the KV cache beside it, for the taps that the stage
captures. Forward hooks keep each tap of a step in a fixed buffer, and after the step the rows go to
their pages, so chunked prefill, cached prefixes and preemption need no thought of their own:
a token whose KV entries are there has its taps there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger

from stagetap.engine.capture.attention_residuals import stream_of
from stagetap.engine.capture.cache import TapCache
from stagetap.engine.capture.decoder import Decoder, find_decoder
from stagetap.engine.capture.dummy import felt_layers
from stagetap.engine.capture.probe import ROWS, Probe
from stagetap.engine.capture.self_check import Entry, SelfCheck, TapPlan, Verdict
from stagetap.errors import Refused
from stagetap.taps import StageTaps, owned_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.utils.hooks import RemovableHandle
    from vllm.config import VllmConfig

__all__ = ["Capture", "TapCache", "install_capture", "installed_capture"]

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name


@dataclass(frozen=True)
class Capture:
    """What a worker captures, known once its model is loaded.

    Attributes:
        taps: the stage's layers and the ids in its columns.
        stream: what the taps are of.
        cache: where they are kept; None when it owns no tap.
        verdicts: what the self-check has proven, one for each tap.
    """

    taps: StageTaps
    stream: str
    cache: TapCache | None = None
    verdicts: tuple[Verdict, ...] = ()


_captures: dict[str, Capture] = {}  # by VllmConfig.instance_id: from worker to its connector


def install_capture(
    model: nn.Module,
    vllm_config: VllmConfig,
    asked: Iterable[int],
    forward: Callable[[int], object],
) -> None:
    """Find this stage's taps, hook them, prove the hooks, and make the tap cache.

    Args:
        model: as vLLM has loaded it.
        vllm_config: the engine's.
        asked: the asked layer ids.
        forward: runs the model on so many dummy tokens, as vLLM does.

    Raises:
        Refused: the taps cannot be found, or the hooks do not capture them.
    """
    with felt_layers(model, vllm_config.load_config.load_format):
        _captures[vllm_config.instance_id] = _install(model, vllm_config, tuple(asked), forward)


def installed_capture(vllm_config: VllmConfig) -> Capture:
    """What :func:`install_capture` set up in this process.

    Raises:
        Refused: nothing was, so this worker is not ours.
    """
    try:
        return _captures[vllm_config.instance_id]
    except KeyError:
        raise Refused(
            "this worker loaded its model without capture; the patch series is missing or "
            "another --worker-cls runs: run `stagetap patch apply`"
        ) from None


def _install(
    model: nn.Module,
    vllm_config: VllmConfig,
    asked: tuple[int, ...],
    forward: Callable[[int], object],
) -> Capture:
    decoder, check = self_check(model, vllm_config, forward)
    stream = stream_of(decoder.parent)
    taps = StageTaps(
        start=decoder.start,
        end=decoder.end,
        layer_ids=owned_ids(decoder.start, decoder.end, asked, len(decoder.layers), stream),
    )
    if not taps.layer_ids:
        return Capture(taps, stream)
    plans = check.choose(taps.layer_ids)
    cache = TapCache(vllm_config, taps)
    hook(plans, cache)
    verdicts = check.prove(plans, cache)
    for verdict in verdicts:
        logger.info(
            "stagetap: stage %d, tap %d: %s; equal to %s on random inputs",
            verdict.stage,
            verdict.layer_id,
            verdict.captured,
            verdict.compared_with,
        )
    return Capture(taps, stream, cache, tuple(verdicts))


def self_check(
    model: nn.Module, vllm_config: VllmConfig, forward: Callable[[int], object]
) -> tuple[Decoder, SelfCheck]:
    """The decoder layers of this stage, and the check that finds and proves their taps.

    Raises:
        Refused: the model has no list of decoder layers that could be told from others.
    """
    group, config = get_pp_group(), vllm_config.model_config
    decoder = find_decoder(model, config.get_total_num_hidden_layers())
    layers_with_cache = vllm_config.compilation_config.static_forward_context.values()
    probe = Probe(
        model,
        decoder,
        width=config.get_hidden_size(),
        vocabulary=config.get_vocab_size(),
        longest=config.max_model_len,
        forward=forward,
        mixers=[layer for layer in layers_with_cache if isinstance(layer, nn.Module)],
        rows=min(ROWS, vllm_config.scheduler_config.max_num_batched_tokens),
    )
    check = SelfCheck(
        model,
        decoder,
        probe,
        stage=group.rank_in_group,
        last=group.is_last_rank,
        dtype=config.dtype,
        share=_share,
        stream=stream_of(decoder.parent),
    )
    return decoder, check


def _share(own: Entry | None) -> list[Entry | None]:
    """Give something to all stages, and get theirs."""
    group = get_pp_group()
    entries: list[Entry | None] = [None] * group.world_size
    torch.distributed.all_gather_object(entries, own, group=group.cpu_group)
    return entries


def hook(plans: Iterable[TapPlan], cache: TapCache) -> list[RemovableHandle]:
    """Let the forward pass fill the cache's columns."""
    return [
        plan.site.tap(plan.parts, plan.into(partial(cache.keep, column)))
        for column, plan in enumerate(plans)
    ]
