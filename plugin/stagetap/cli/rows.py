"""``stagetap rows``: the rows that a draft is trained on, out of a dataset."""

from __future__ import annotations

import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from stagetap.cli.arguments import JsonOption
from stagetap.cli.output import print_json, results, stdout_kept_clean
from stagetap.errors import Refused
from stagetap.stores.mooncake_uri import is_mooncake

if TYPE_CHECKING:
    from stagetap.reader.dataset import HiddenStatesDataset
    from stagetap.training.rows import LearnFrom


def rows_command(
    uri: Annotated[
        str, typer.Argument(help="A directory, file:///directory or mooncake://MASTER:PORT/RUN.")
    ],
    out: Annotated[
        Path, typer.Option("--out", help="A folder to make: --data-path of stagetap train.")
    ],
    run: Annotated[str | None, typer.Option("--run", help="This run alone.")] = None,
    learn_from: Annotated[
        str,
        typer.Option(
            "--learn-from",
            help="output: the tokens that the target sampled; all; metadata: those from the "
            "position on that is in a sample's metadata as first_loss_token.",
        ),
    ] = "output",
    min_loss_tokens: Annotated[
        int,
        typer.Option(
            "--min-loss-tokens", min=1, help="Leave out samples with fewer tokens to learn from."
        ),
    ] = 1,
    as_json: JsonOption = False,
) -> None:
    """Write the token ids and loss masks of a dataset's samples as a data folder of speculators.

    The states stay where they are: `stagetap train` finds the sample of each row.
    """
    from stagetap.stores.base import open_store_reader
    from stagetap.training.register import require_speculators

    if not is_mooncake(uri):
        open_store_reader(uri)  # a wrong path is told before a package that is missing
    require_speculators()
    choice = _learn_from(learn_from)
    with stdout_kept_clean() as stdout:
        from stagetap.training.rows import write_rows

        report = write_rows(samples_of(uri, run), out, choice, min_loss_tokens)
        document = {"out": str(out), **asdict(report)}
        if as_json:
            print_json(document, stdout)
            return
        results(stdout).print(
            f"{out}: {report.rows} rows of {report.tokens} tokens, {report.loss_tokens} of them to "
            f"learn from; {report.too_few} samples left out for having fewer than {min_loss_tokens}"
        )


def samples_of(uri: str, run: str | None) -> HiddenStatesDataset:
    """The samples of a store, or of one of its runs. Raises Refused for a run that is not there."""
    from stagetap import open_dataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is refused here
        dataset = open_dataset(uri, run=run)
    if run is not None and run not in dataset.runs:
        there = ", ".join(dataset.runs) or "none"
        raise Refused(f"{uri} has no run {run!r}; it has {there}")
    return dataset


def _learn_from(text: str) -> LearnFrom:
    from stagetap.training.rows import LearnFrom

    for choice in get_args(LearnFrom):
        if text == choice:
            return choice
    raise Refused(f"--learn-from {text}: write one of {', '.join(get_args(LearnFrom))}")
