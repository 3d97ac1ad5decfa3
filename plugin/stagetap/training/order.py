"""The order in which speculators' trainer asks for rows; what is captured meanwhile keeps to it."""

from __future__ import annotations

from collections.abc import Sequence

from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

_VALIDATION_SEED = 0
"""Validation rows are packed by this one, whatever the run's seed is."""


def asked_rows(
    lengths: Sequence[int], ranks: int, total_seq_len: int, seed: int, train_data_ratio: float
) -> list[int]:
    """Positions of rows in the order of the first epoch: those of training, then of validation.

    speculators' own sampler packs them, for every rank. Rows that are left at the end, too few for
    one more step of all ranks, are never asked for.

    Args:
        lengths: tokens of each row.
        ranks: of the trainer.
        total_seq_len: ``--total-seq-len``.
        seed: ``--seed``.
        train_data_ratio: ``--train-data-ratio``.
    """
    split = int(len(lengths) * train_data_ratio)  # as its dataset splits them
    order: list[int] = []
    for start, part, part_seed in (
        (0, lengths[:split], seed),
        (split, lengths[split:], _VALIDATION_SEED),
    ):
        samplers = [
            MultipackDistributedBatchSamplerV2(total_seq_len, part, ranks, rank, seed=part_seed)
            for rank in range(ranks)
        ]
        for step in zip(*samplers, strict=True):
            order += [start + int(row) for batch in step for row in batch]
    return order
