"""``stagetap train-prompts``: what to capture while a trainer reads it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stagetap.cli.arguments import JsonOption
from stagetap.cli.output import print_json, results, stdout_kept_clean


def train_prompts_command(
    rows: Annotated[Path, typer.Argument(help="A folder of rows: --data-path of stagetap train.")],
    out: Annotated[Path, typer.Option("--out", help="The file of prompts to make.")],
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks of the trainer.")],
    total_seq_len: Annotated[int, typer.Option("--total-seq-len", min=1, help="As the trainer's.")],
    seed: Annotated[int, typer.Option("--seed", help="As the trainer's.")] = 42,
    train_data_ratio: Annotated[
        float, typer.Option("--train-data-ratio", min=0.01, max=0.99, help="As the trainer's.")
    ] = 0.9,
    min_loss_tokens: Annotated[
        int,
        typer.Option("--min-loss-tokens", min=0, help="As its --stagetap-min-loss-tokens."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Write the rows that `stagetap train` will read as prompts, in its order.

    Captured in this order, a row's sample is there when the trainer asks for it, and nothing is
    captured that it never reads.
    """
    from stagetap.training.register import require_speculators

    require_speculators()
    with stdout_kept_clean() as stdout:
        from stagetap.training.row_prompts import write_prompts

        report = write_prompts(
            rows,
            out,
            ranks=ranks,
            total_seq_len=total_seq_len,
            seed=seed,
            train_data_ratio=train_data_ratio,
            min_loss_tokens=min_loss_tokens,
        )
        if as_json:
            print_json({"out": str(out), **asdict(report)}, stdout)
            return
        results(stdout).print(
            f"{out}: {report.prompts} prompts of {report.tokens} tokens; {report.too_few} rows "
            f"left out for having fewer than {min_loss_tokens} tokens to learn from, "
            f"{report.never_asked} that the trainer never reads"
        )
