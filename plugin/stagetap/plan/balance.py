"""Would another partition of the layers hold more KV cache?

vLLM gives every stage the number of KV blocks that the smallest one can hold. Taps cost memory on
the stage that owns them, so with a capture the even split of layers is often not the one that holds
most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagetap.errors import Refused
from stagetap.partition import stage_layers
from stagetap.taps import STREAM_RESIDUAL, owned_ids

WORTH_SAYING = 0.05
"""The gain in KV blocks above which a partition is worth a restart."""


@dataclass(frozen=True)
class Balance:
    """What decides how many KV blocks a stage can hold; all sizes are those of one GPU.

    Attributes:
        partition: decoder layers of every stage, as ``VLLM_PP_LAYER_PARTITION`` has them.
        memory_bytes: of every stage, for its decoder layers, their cache, and its taps: what is
            left when all is taken off that stays where it is when a layer moves.
        layer_weight_bytes: of every decoder layer.
        layer_block_bytes: cache of every decoder layer in one block.
        layer_ids: the asked taps.
        tap_block_bytes: of one tap in one block.
        tap_fixed_bytes: of one tap, however many blocks there are: its capture buffer.
        stream: what the taps are of, which says who owns them.
    """

    partition: tuple[int, ...]
    memory_bytes: tuple[int, ...]
    layer_weight_bytes: tuple[int, ...]
    layer_block_bytes: tuple[int, ...]
    layer_ids: tuple[int, ...]
    tap_block_bytes: int
    tap_fixed_bytes: int
    stream: str = STREAM_RESIDUAL

    @classmethod
    def measured(
        cls,
        partition: Sequence[int],
        available_bytes: Sequence[int],
        layer_weight_bytes: Sequence[int],
        layer_block_bytes: Sequence[int],
        layer_ids: Sequence[int],
        tap_block_bytes: int,
        tap_fixed_bytes: int,
        stream: str = STREAM_RESIDUAL,
    ) -> Balance:
        """From an engine's own numbers: what each stage has left for KV blocks as it runs now.

        Args:
            available_bytes: of every stage, the least over its ranks, as a worker's
                ``determine_available_memory`` returns it, weights and capture buffers taken off.

        Other arguments are the attributes of the same name.
        """
        total = len(layer_weight_bytes)
        stages = stage_layers(total, len(partition), partition)
        memory = tuple(
            available
            + sum(layer_weight_bytes[start:end])
            + tap_fixed_bytes * len(owned_ids(start, end, layer_ids, total, stream))
            for available, (start, end) in zip(available_bytes, stages, strict=True)
        )
        return cls(
            partition=tuple(partition),
            memory_bytes=memory,
            layer_weight_bytes=tuple(layer_weight_bytes),
            layer_block_bytes=tuple(layer_block_bytes),
            layer_ids=tuple(layer_ids),
            tap_block_bytes=tap_block_bytes,
            tap_fixed_bytes=tap_fixed_bytes,
            stream=stream,
        )

    def blocks(self, partition: Sequence[int]) -> tuple[float, ...]:
        """KV blocks that every stage could hold under a partition, not rounded; 0 for no room.

        A stage that caches nothing holds any number, ``inf``.
        """
        found = []
        total = len(self.layer_weight_bytes)
        stages = stage_layers(total, len(partition), partition)
        for memory, (start, end) in zip(self.memory_bytes, stages, strict=True):
            taps = len(owned_ids(start, end, self.layer_ids, total, self.stream))
            room = memory - sum(self.layer_weight_bytes[start:end]) - taps * self.tap_fixed_bytes
            block = sum(self.layer_block_bytes[start:end]) + taps * self.tap_block_bytes
            found.append(max(0.0, room / block) if block else float("inf"))
        return tuple(found)


@dataclass(frozen=True)
class StageBudget:
    """What one rank of a running engine measured; sizes in bytes.

    Attributes:
        available_bytes: what ``determine_available_memory`` returned.
        layer_weight_bytes: of its decoder layers, in their order; 0 where the memory for KV blocks
            is given and not what weights leave.
        layer_block_bytes: cache of these layers in one block.
        tap_block_bytes: of one tap in one block, 0 for a stage that owns none.
        tap_fixed_bytes: the capture buffer of one tap, 0 as for weights or where it owns none.
    """

    available_bytes: int
    layer_weight_bytes: tuple[int, ...]
    layer_block_bytes: tuple[int, ...]
    tap_block_bytes: int
    tap_fixed_bytes: int


def engine_balance(
    stages: Sequence[Sequence[StageBudget | None]], layer_ids: Sequence[int], stream: str
) -> Balance | None:
    """The balance of a running engine; None where a rank has nothing to say.

    Args:
        stages: what every rank of every stage measured. A stage has the layers of its first rank,
            and the memory of the rank with least.
        layer_ids: the asked taps.
        stream: what they are of.
    """
    measured = [[rank for rank in stage if rank is not None] for stage in stages]
    if any(
        len(said) < len(stage) or not stage for said, stage in zip(measured, stages, strict=True)
    ):
        return None
    first = [stage[0] for stage in measured]
    return Balance.measured(
        partition=[len(stage.layer_weight_bytes) for stage in first],
        available_bytes=[min(rank.available_bytes for rank in stage) for stage in measured],
        layer_weight_bytes=[size for stage in first for size in stage.layer_weight_bytes],
        layer_block_bytes=[size for stage in first for size in stage.layer_block_bytes],
        layer_ids=layer_ids,
        tap_block_bytes=max(stage.tap_block_bytes for stage in first),
        tap_fixed_bytes=max(stage.tap_fixed_bytes for stage in first),
        stream=stream,
    )


@dataclass(frozen=True)
class Advice:
    """A partition that holds more KV cache than the present one.

    Attributes:
        partition: decoder layers of every stage.
        gain: how many more blocks, 0.06 being 6 per cent; ``inf`` where there was no room at all.
        smallest: the stage that holds fewest now.
        source: the stage that gives a layer away.
        target: the one that takes it.
    """

    partition: tuple[int, ...]
    gain: float
    smallest: int
    source: int
    target: int

    def line(self) -> str:
        """What to tell the user, in one line."""
        more = "room for any" if self.gain == float("inf") else f"{self.gain:.0%} more"
        return (
            f"KV blocks are those of the smallest stage, stage {self.smallest}; one layer from "
            f"stage {self.source} to stage {self.target} would give {more}: "
            f"VLLM_PP_LAYER_PARTITION={','.join(map(str, self.partition))}"
        )


def better_partition(balance: Balance, worth: float = WORTH_SAYING) -> Advice | None:
    """The best partition that moves one layer to another stage, if it gains more than ``worth``.

    Every stage keeps a layer. Of equal gains the first is given, in order of the stages.

    Raises:
        Refused: the partition does not fit the layers.
    """
    if len(balance.memory_bytes) != len(balance.partition):
        raise Refused(
            f"{len(balance.memory_bytes)} stages have memory, {len(balance.partition)} have layers"
        )
    now = balance.blocks(balance.partition)
    smallest = now.index(min(now))
    best: Advice | None = None
    most = min(now)
    for source, layers in enumerate(balance.partition):
        for target in range(len(balance.partition)):
            if source == target or layers <= 1:
                continue
            moved = list(balance.partition)
            moved[source] -= 1
            moved[target] += 1
            then = min(balance.blocks(moved))
            gain = _gain(now[smallest], then)
            if gain > worth and then > most:
                best, most = Advice(tuple(moved), gain, smallest, source, target), then
    return best


def _gain(now: float, then: float) -> float:
    if then <= now:  # infinite ones too
        return 0.0
    return then / now - 1 if now else float("inf")
