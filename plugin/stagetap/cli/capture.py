"""``stagetap capture``: prompts in, dataset out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from stagetap.cli.arguments import (
    EngineArgOption,
    JsonOption,
    LayersOption,
    MaxLenOption,
    ModelOption,
    PpOption,
    TpOption,
    agreed,
    agreed_max_len,
    agreed_ranks,
    engine_arguments,
)
from stagetap.cli.capture_target import capture_target
from stagetap.cli.interrupt import INTERRUPTED_EXIT
from stagetap.cli.output import human_bytes, notes, print_json, results, stdout_kept_clean
from stagetap.layer_choice import choose_layers
from stagetap.models import resolve_model


def capture_command(
    model: ModelOption,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSONL, one prompt a line.")],
    out: Annotated[
        str,
        typer.Option(
            "--out", help="A directory, made if needed, or mooncake://MASTER:PORT/RUN?OPTIONS."
        ),
    ],
    layers: LayersOption,
    pp: PpOption = 1,
    tp: TpOption = 1,
    max_len: MaxLenOption = None,
    include_output: Annotated[
        int,
        typer.Option(
            "--include-output",
            min=0,
            help="Greedy output tokens to generate and to keep rows for; 0 keeps the prompt alone.",
        ),
    ] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run: only what is missing.")
    ] = False,
    run: Annotated[
        str | None,
        typer.Option("--run", help="Name of the run in the store; default: capture."),
    ] = None,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, help="Prompts in the engine at a time.")
    ] = 16,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="As vLLM's --dtype; default: auto.")
    ] = None,
    keep_free_mib: Annotated[
        int | None,
        typer.Option(
            "--keep-free-mib", min=0, help="Room to leave on the disk, in MiB; default: 512."
        ),
    ] = None,
    engine_arg: EngineArgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture hidden states of the prompts in a JSONL file into a dataset.

    Each line holds exactly one of text, prompt_token_ids and messages (for the chat template), and
    optionally id and metadata.
    """
    from stagetap.cli.capture_job import CaptureJob
    from stagetap.cli.model_facts import model_facts

    target = capture_target(out, run, resume=resume, keep_free_mib=keep_free_mib)
    model = resolve_model(model)
    engine_args = engine_arguments(engine_arg)
    agreed_ranks(engine_args, pp, tp)
    agreed(engine_args, "model", "--model", model)
    dtype = agreed(engine_args, "dtype", "--dtype", dtype)
    max_len = agreed_max_len(engine_args, max_len)
    job = CaptureJob(
        model=model,
        layers=choose_layers(layers, model_facts(model).num_hidden_layers),
        target=target,
        pp=pp,
        tp=tp,
        max_len=max_len,
        include_output=include_output,
        in_flight=in_flight,
        engine_args=engine_args | ({} if dtype is None else {"dtype": dtype}),
    )
    with stdout_kept_clean() as stdout:
        report = job.run(prompts, resume)
        _show(report, as_json, stdout)
    if report["stopped"] == "interrupt":
        raise typer.Exit(INTERRUPTED_EXIT)
    if report["failed"] or report["stopped"]:
        raise typer.Exit(1)


def _show(report: dict[str, Any], as_json: bool, stdout: TextIO) -> None:
    remarks = notes()
    for failure in report["failures"]:
        remarks.print(f"failed: {failure['sample_id']}: {failure['error']}", soft_wrap=True)
    if report["failed"] > len(report["failures"]):
        remarks.print(f"failed: and {report['failed'] - len(report['failures'])} more")
    if report["stopped"] == "disk":
        remarks.print(
            f"stopped before the disk is full: {human_bytes(report['free_bytes'])} free, "
            f"{report['left']} prompts left; make room and run the same command with --resume",
            soft_wrap=True,
        )
    elif report["stopped"] == "failures":
        remarks.print(
            f"stopped: too many samples failed in a row; {report['left']} prompts left; mend the "
            "cause above and run the same command with --resume",
            soft_wrap=True,
        )
    elif report["stopped"] == "interrupt":
        remarks.print(
            f"interrupted: {report['samples'] + report['skipped']} samples are committed, "
            f"{report['left']} prompts left; run the same command with --resume to go on",
            soft_wrap=True,
        )
    if as_json:
        print_json(report, stdout)
        return
    skipped = f", {report['skipped']} were there" if report["skipped"] else ""
    results(stdout).print(
        f"{report['out']}: {report['samples']} samples captured{skipped}, "
        f"{report['tokens']} tokens, {human_bytes(report['bytes'])}, "
        f"{report['tokens_per_second']:.0f} tokens/s",
        soft_wrap=True,
    )
