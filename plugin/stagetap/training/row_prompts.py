"""Rows of training data as prompts to capture, in the order in which the trainer asks for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from stagetap.errors import Refused
from stagetap.training.order import asked_rows


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
        Refused: there are no such rows, the file cannot be written, or it would be empty.
    """
    from datasets import load_from_disk

    try:
        table = load_from_disk(str(rows)).with_format("numpy")
    except (OSError, ValueError) as error:
        raise Refused(
            f"{rows} is no folder of rows ({error}): give one of stagetap rows or speculators "
            "prepare-data"
        ) from None
    order = asked_rows(
        table.with_format(None)["seq_len"][:], ranks, total_seq_len, seed, train_data_ratio
    )
    prompts = tokens = too_few = 0
    try:
        with file.open("x", encoding="utf-8") as out:
            for position in order:
                row = table[position]
                if int(row["loss_mask"].sum()) < min_loss_tokens:
                    too_few += 1
                    continue
                ids = row["input_ids"].tolist()
                prompts, tokens = prompts + 1, tokens + len(ids)
                print(json.dumps({"id": f"row-{position}", "prompt_token_ids": ids}), file=out)
    except OSError as error:
        raise Refused(f"{file} cannot be written ({error.strerror}): name another --out") from None
    if not prompts:
        file.unlink()
        raise Refused(
            f"the trainer would ask for none of {len(table)} rows of {rows}, {too_few} of them "
            f"having fewer than {min_loss_tokens} tokens to learn from: give more rows, or fewer "
            "--ranks"
        )
    return PromptsReport(prompts, tokens, too_few, len(table) - len(order))
