"""Which decoder layers each pipeline stage will run, told before an engine starts.

The engine derives the truth from its workers; this is vLLM's rule, so that a layout that no engine
would start with is refused in milliseconds. A test holds it against ``get_pp_indices``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from stagetap.errors import Refused
from stagetap.taps import STREAM_RESIDUAL, owned_ids
from stagetap.wording import counted, shortened, shown

PARTITION_ENV = "VLLM_PP_LAYER_PARTITION"
"""vLLM's variable: layers of each stage, between commas."""


def stage_layers(
    num_hidden_layers: int, pp: int, partition: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """``[start, end)`` of the decoder layers of every stage.

    Args:
        num_hidden_layers: N.
        pp: pipeline stages.
        partition: layers per stage, as ``VLLM_PP_LAYER_PARTITION`` has them; vLLM's even split
            when absent.

    Raises:
        Refused: more stages than layers, a stage without one (vLLM plans no cache for a stage that
            has nothing to cache), or a partition that does not have ``pp`` parts or does not add
            up to N.
    """
    if pp > num_hidden_layers:
        raise Refused(
            f"{pp} pipeline stages are more than the model's {num_hidden_layers} decoder layers; "
            f"use at most {num_hidden_layers}"
        )
    counts = _even_split(num_hidden_layers, pp) if partition is None else list(partition)
    if len(counts) != pp or sum(counts) != num_hidden_layers or min(counts) < 0:
        raise Refused(
            f"partition {shortened(','.join(map(str, counts)))} must have {counted(pp, 'part')} "
            f"that add up to the {num_hidden_layers} layers of the model, not {sum(counts)}"
        )
    if 0 in counts:
        raise Refused(
            f"partition {','.join(map(str, counts))} leaves stage {counts.index(0)} without a "
            "decoder layer; give every stage one, or use fewer stages"
        )
    ends = [sum(counts[: stage + 1]) for stage in range(pp)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def owners(
    stages: Sequence[tuple[int, int]], layer_ids: Sequence[int], stream: str = STREAM_RESIDUAL
) -> dict[int, list[int]]:
    """Owning stage -> its layer ids, ascending; stages that own none are left out."""
    total = stages[-1][1]
    owned = {
        stage: list(owned_ids(*layers, layer_ids, total, stream))
        for stage, layers in enumerate(stages)
    }
    return {stage: ids for stage, ids in owned.items() if ids}


def engine_stages(num_hidden_layers: int, pp: int) -> list[tuple[int, int]]:
    """``[start, end)`` of every stage of an engine that this process's environment will start.

    Raises:
        Refused: as :func:`stage_layers`, naming the variable where the partition comes from there.
    """
    text = os.environ.get(PARTITION_ENV)
    if text is None:
        return stage_layers(num_hidden_layers, pp)
    try:
        return stage_layers(num_hidden_layers, pp, parse_partition(text))
    except Refused as error:
        raise Refused(f"{PARTITION_ENV}: {error}, or unset the variable") from None


def parse_partition(text: str) -> list[int]:
    """Read ``10,20``. Raises Refused for anything but integers between commas."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[+-]?[0-9]{1,9}", part) for part in parts):
        raise Refused(
            f"partition {shown(text)}: write the number of layers of each stage between commas, "
            "such as 10,20"
        )
    return [int(part) for part in parts]


def _even_split(num_hidden_layers: int, pp: int) -> list[int]:
    # What does not divide goes to the stages before the last, which has the output head as well.
    counts = [num_hidden_layers // pp] * pp
    for i in range(num_hidden_layers % pp):
        counts[-2 - i] += 1
    return counts
