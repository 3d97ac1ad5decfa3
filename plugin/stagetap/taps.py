"""Which taps exist, in which order they were asked for, and which stage owns each. Pure rules.

A tap (layer id) ``k`` is the residual stream after decoder layer ``k - 1`` ran, before any final
norm: 0 is the embedding output, ``N`` (``num_hidden_layers``) the last one. Who owns a tap follows
from its stream: :func:`owning_layer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stagetap.errors import Refused
from stagetap.wording import shown

ID_CONVENTION = "after-layer"
"""Written into every manifest: id ``k`` is the stream after decoder layer ``k - 1``."""

STREAM_RESIDUAL = "residual"
"""The plain residual stream."""

STREAM_PREFIX_SUM = "prefix_sum"
"""Of a model with attention residuals (Kimi-K3): what its layers since the last block add up to."""

STREAM_MIXTURE = "attn_res_mixture"
"""Of such a model: what the next layer, or the final norm, reads, before any norm."""

MIXTURE_ENV = "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"
"""vLLM's variable: 1 makes the taps of such a model those of the mixture, 0 the prefix sum's."""

NORM_STATE = "pre_norm"

_ID = re.compile(r"[+-]?[0-9]{1,9}")

Role = Literal["aux", "last"]


def stream_of_k3_draft(fc_norm: bool) -> str:
    """The stream kind that a draft of Kimi-K3 reads: with a norm for each tap, the mixture."""
    return STREAM_MIXTURE if fc_norm else STREAM_PREFIX_SUM


def validate_layer_ids(layers: Any, num_hidden_layers: int | None = None) -> tuple[int, ...]:
    """Check asked layer ids and return them in the order in which they were asked for.

    ``num_hidden_layers`` is N; without it only the upper bound goes unchecked.

    Raises:
        Refused: not a list, empty, a bool or another non-integer, negative, repeated, or above N.
    """
    if isinstance(layers, (str, bytes)) or not isinstance(layers, Sequence):
        raise Refused(
            f"layers must be a list of layer ids such as [2, 15, 27], not {shown(layers)}"
        )
    if not layers:
        raise Refused("layers is empty: name at least one layer id, such as [2, 15, 27]")
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, int):
            raise Refused(f"layers: {shown(layer)} is not a layer id; ids are integers such as 15")
        if layer < 0:
            raise Refused(f"layers: {layer} is negative; ids count up from 0, the embedding output")
        if num_hidden_layers is not None and layer > num_hidden_layers:
            raise Refused(
                f"layers: {layer} is above {num_hidden_layers}, the last id of this model "
                f"with {num_hidden_layers} decoder layers; ask for ids from 0 to "
                f"{num_hidden_layers}"
            )
    repeated = sorted({layer for layer in layers if list(layers).count(layer) > 1})
    if repeated:
        raise Refused(f"layers: {repeated[0]} is asked for more than once; name each id once")
    return tuple(layers)


def parse_layer_ids(text: str) -> tuple[int, ...]:
    """Read layer ids from a command line: ``"2,15,27,30"``.

    Raises:
        Refused: as :func:`validate_layer_ids`, and for anything but integers between commas.
    """
    ids: list[int] = []
    for part in text.split(",") if text.strip() else []:
        if not _ID.fullmatch(part.strip()):
            raise Refused(
                f"layers: {shown(part.strip())} is not a layer id; write ids between commas, "
                "such as 2,15,27,30"
            )
        ids.append(int(part))
    return validate_layer_ids(ids)


def owning_layer(layer_id: int, stream: str, num_hidden_layers: int) -> int:
    """The decoder layer whose stage owns a tap.

    A tap belongs to the layer that ran before it: a stage that runs ``[start, end)`` owns the ids
    ``start < k <= end``, and the first one 0 as well. The mixture of attention residuals is scored
    with the weights of the layer that reads it, and so belongs to that one: ``start <= k < end``,
    and N to the last stage as well.
    """
    if stream == STREAM_MIXTURE:
        return min(layer_id, num_hidden_layers - 1)
    return max(layer_id - 1, 0)


def owned_ids(
    start: int,
    end: int,
    asked: Sequence[int],
    num_hidden_layers: int,
    stream: str = STREAM_RESIDUAL,
) -> tuple[int, ...]:
    """The asked ids that a stage running layers ``[start, end)`` owns, ascending."""
    return tuple(
        sorted(k for k in asked if start <= owning_layer(k, stream, num_hidden_layers) < end)
    )


def role_of(layer_id: int, num_hidden_layers: int) -> Role:
    """``last`` for id N, ``aux`` for every other one."""
    return "last" if layer_id == num_hidden_layers else "aux"


@dataclass(frozen=True)
class StageTaps:
    """What one worker says that it will capture: its layers ``[start, end)`` and its ids."""

    start: int
    end: int
    layer_ids: tuple[int, ...]


def check_ownership(
    asked: Sequence[int], num_hidden_layers: int, workers: Mapping[tuple[int, int], StageTaps]
) -> tuple[StageTaps, ...]:
    """Turn what every worker will capture into one answer per stage, in stage order.

    Args:
        asked: the asked layer ids.
        num_hidden_layers: N.
        workers: what each worker will capture, by ``(pipeline rank, tensor-parallel rank)``.

    Raises:
        Refused: ranks of one stage differ, a stage is missing, the stages do not cover the
            layers ``[0, N)`` one after the other, or an asked id has no owner or two.
    """
    stages: list[StageTaps] = []
    for stage in range(max(pp for pp, _ in workers) + 1):
        answers = {taps for (pp, _), taps in workers.items() if pp == stage}
        if not answers:
            raise Refused(f"stage {stage} did not say which taps it captures; restart the engine")
        if len(answers) > 1:
            raise Refused(
                f"the tensor-parallel ranks of stage {stage} would capture different taps: "
                f"{sorted(taps.layer_ids for taps in answers)}; every rank must run one "
                "configuration"
            )
        stages.append(answers.pop())

    expected_start = 0
    for stage, taps in enumerate(stages):
        if taps.start != expected_start or taps.end < taps.start:
            raise Refused(
                f"stage {stage} runs layers [{taps.start}, {taps.end}) where layer "
                f"{expected_start} comes next; every node must run one pipeline partition"
            )
        expected_start = taps.end
    if expected_start != num_hidden_layers:
        raise Refused(
            f"the stages run {expected_start} layers of {num_hidden_layers}; every node must run "
            "one pipeline partition"
        )

    for layer in asked:
        owners = [stage for stage, taps in enumerate(stages) if layer in taps.layer_ids]
        if len(owners) != 1:
            raise Refused(
                f"tap {layer} would be captured by "
                f"{'no stage' if not owners else f'stages {owners}'}, not by exactly one"
            )
    surplus = {k for taps in stages for k in taps.layer_ids} - set(asked)
    if surplus:
        raise Refused(f"stages would capture taps {sorted(surplus)} that nobody asked for")
    return tuple(stages)
