"""Rows of training data as prompts to capture, in the order in which the trainer asks for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from stagetap.errors import Refused
from stagetap.training.order import asked_rows
from stagetap.training.training_rows import TrainingRows, check_learnt_from


@dataclass(frozen=True)
class PromptsReport:
    """What was written.

    Attributes:
        prompts: how many.
        tokens: of all of them.
        too_few: rows left out for having too few tokens to learn from.
        never_asked: rows left out because no step of the trainer has them.
    """

    prompts: int
    tokens: int
    too_few: int
    never_asked: int


def write_prompts(
    rows: Path,
    file: Path,
    *,
    ranks: int,
    total_seq_len: int,
    seed: int,
    train_data_ratio: float,
    min_loss_tokens: int,
) -> PromptsReport:
    """Write a file for ``stagetap capture``, or for a client of ``stagetap serve``.

    Arguments as :func:`asked_rows`, and ``min_loss_tokens`` as the trainer is given it.

    Raises:
        Refused: there are no such rows, one contradicts itself, none is learnt from, the file
            cannot be written, or it would be empty.
    """
    table = TrainingRows(rows, total_seq_len)
    order = asked_rows(table.lengths(), ranks, total_seq_len, seed, train_data_ratio)
    loss_tokens = {position: table[position].loss_tokens for position in order}
    check_learnt_from(loss_tokens.values(), rows, total_seq_len)
    kept = [position for position in order if loss_tokens[position] >= min_loss_tokens]
    too_few = len(order) - len(kept)
    if not kept:
        raise Refused(
            f"the trainer would ask for none of {len(table)} rows of {rows}, {too_few} of them "
            f"having fewer than {min_loss_tokens} tokens to learn from: give more rows, or fewer "
            "--ranks"
        )
    tokens = 0
    try:
        with file.open("x", encoding="utf-8") as out:
            for position in kept:
                ids = table[position].input_ids.tolist()
                tokens += len(ids)
                print(json.dumps({"id": f"row-{position}", "prompt_token_ids": ids}), file=out)
    except OSError as error:
        raise Refused(f"{file} cannot be written ({error.strerror}): name another --out") from None
    return PromptsReport(len(kept), tokens, too_few, len(table) - len(order))
