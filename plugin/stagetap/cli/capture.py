"""``stagetap capture``: prompts in, dataset out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
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
    engine_arguments,
)
from stagetap.cli.interrupt import INTERRUPTED_EXIT, Interruption
from stagetap.cli.output import activity, human_bytes, notes, print_json, results, stdout_kept_clean
from stagetap.errors import Refused
from stagetap.models import resolve_model
from stagetap.taps import parse_layer_ids, validate_layer_ids

DEFAULT_RUN = "capture"
_MIB = 1024 * 1024


def capture_command(
    model: ModelOption,
    prompts: Annotated[Path, typer.Option("--prompts", help="JSONL, one prompt a line.")],
    out: Annotated[str, typer.Option("--out", help="The dataset: a directory, made if needed.")],
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
    run: Annotated[str, typer.Option("--run", help="Name of the run in the store.")] = DEFAULT_RUN,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=1, help="Prompts in the engine at a time.")
    ] = 16,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="As vLLM's --dtype; default: the checkpoint's.")
    ] = None,
    keep_free_mib: Annotated[
        int,
        typer.Option("--keep-free-mib", min=0, help="Room to leave on the disk, in MiB."),
    ] = 512,
    engine_arg: EngineArgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture hidden states of the prompts in a JSONL file into a dataset.

    Each line holds exactly one of text, prompt_token_ids and messages (for the chat template), and
    optionally id and metadata.
    """
    job = _Job(
        model=resolve_model(model),
        layers=parse_layer_ids(layers),
        out=out,
        run=run,
        pp=pp,
        tp=tp,
        max_len=max_len,
        include_output=include_output,
        in_flight=in_flight,
        engine_args=engine_arguments(engine_arg) | ({"dtype": dtype} if dtype else {}),
        keep_free_bytes=keep_free_mib * _MIB,
    )
    with stdout_kept_clean() as stdout:
        report = _capture(job, prompts, resume)
        _show(job, report, as_json, stdout)
    if report["stopped"] == "interrupt":
        raise typer.Exit(INTERRUPTED_EXIT)
    if report["failed"] or report["stopped"]:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Job:
    model: str
    layers: tuple[int, ...]
    out: str
    run: str
    pp: int
    tp: int
    max_len: int | None
    include_output: int
    in_flight: int
    engine_args: dict[str, Any]
    keep_free_bytes: int

    @property
    def output_rows(self) -> int:
        """Rows of a sample beyond its prompt: the last output token has no state."""
        return max(0, self.include_output - 1)


def _capture(job: _Job, prompt_file: Path, resume: bool) -> dict[str, Any]:
    """Everything that can be refused without an engine, then the engine."""
    from stagetap.cli.capture_run import Tally
    from stagetap.cli.committed import CommittedSamples
    from stagetap.cli.disk import DiskGuard
    from stagetap.cli.model_facts import model_facts
    from stagetap.prompts import TokenPrompt, check_lengths, check_token_ids
    from stagetap.stores.base import file_root

    facts = model_facts(job.model)
    validate_layer_ids(job.layers, facts.num_hidden_layers)
    prompts = load_prompts(prompt_file, job.model)
    if facts.vocab_size is not None:
        check_token_ids(prompt_file, prompts, facts.vocab_size)
    if (max_len := job.max_len or facts.max_len) is not None:
        check_lengths(prompt_file, prompts, max_len, job.include_output)

    committed = CommittedSamples(job.out, job.run)
    if len(committed) and not resume:
        raise Refused(
            f"{job.out} holds {len(committed)} samples of run {job.run!r} already; add --resume to "
            "capture what is missing, or choose another --out or --run"
        )
    committed.check_layers(job.layers)
    missing: list[TokenPrompt] = committed.missing(prompts)

    guard = DiskGuard(
        Path(file_root(job.out)),
        job.keep_free_bytes,
        facts.row_bytes(len(job.layers), job.engine_args.get("dtype")),
    )
    _check_room(job, guard, missing)
    tally, seconds = (Tally(), 0.0)
    if missing:
        tally, seconds = _run_engine(job, missing, guard)
    return {
        "out": job.out,
        "run": job.run,
        "model": job.model,
        "layer_ids": list(job.layers),
        "pp": job.pp,
        "tp": job.tp,
        "prompts": len(prompts),
        "skipped": len(prompts) - len(missing),
        "samples": tally.samples,
        "failed": tally.failed,
        "left": len(missing) - tally.samples - tally.failed,
        "tokens": tally.tokens,
        "bytes": tally.bytes,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tally.tokens / seconds, 1) if seconds else 0.0,
        "stopped": tally.stopped,
        "free_bytes": guard.free_bytes(),
        "failures": [
            {"sample_id": failure.sample_id, "error": failure.error} for failure in tally.failures
        ],
    }


def load_prompts(prompt_file: Path, model: str) -> list[Any]:
    """The prompts of a file as token ids, with the tokenizer of ``model`` if a line needs it.

    Raises:
        Refused: a bad line, by number, or a model whose tokenizer cannot be loaded.
    """
    from stagetap.prompts import read_prompt_file, tokenize

    def load_tokenizer() -> Any:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise Refused(
                f"the tokenizer of {model} cannot be loaded ({reason}); write the prompts as "
                "prompt_token_ids"
            ) from None

    return tokenize(prompt_file, read_prompt_file(prompt_file), load_tokenizer)


def _check_room(job: _Job, guard: Any, prompts: Sequence[Any]) -> None:
    """Refuse to start an engine for nothing; remark when the room will not do for all."""
    rows = [len(prompt.token_ids) + job.output_rows for prompt in prompts]
    if rows and not guard.admits(rows[:1]):
        raise Refused(
            f"the disk of {job.out} has {human_bytes(guard.free_bytes())} free and "
            f"{human_bytes(guard.keep_free_bytes)} are to stay free; make room, or lower "
            "--keep-free-mib"
        )
    if not guard.admits(rows):
        needed = sum(guard.sample_bytes(count) for count in rows)
        notes().print(
            f"note: the samples need up to {human_bytes(needed)}, "
            f"{human_bytes(guard.free_bytes())} are free: the capture will stop before the disk "
            "is full",
            soft_wrap=True,
        )


def _run_engine(job: _Job, prompts: Sequence[Any], guard: Any) -> tuple[Any, float]:
    from stagetap.cli.capture_progress import CaptureProgress
    from stagetap.cli.capture_run import CaptureRun
    from stagetap.engine.session import CaptureSession

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    engine_args = {
        "use_tqdm_on_load": False,
        # Prompts come as token ids; only generation asks the tokenizer where to end.
        "skip_tokenizer_init": not job.include_output,
        **job.engine_args,
    }
    with Interruption(_say_stopping) as interruption:
        with activity() as notify:
            notify(f"starting vLLM with {job.pp} stages of {job.tp} ranks")
            session = CaptureSession(
                job.model,
                layers=job.layers,
                store=job.out,
                pp=job.pp,
                tp=job.tp,
                max_len=job.max_len,
                run_id=job.run,
                include_output=job.include_output,
                engine_args=engine_args,
            )
        interruption.defer()
        try:
            with CaptureProgress(len(prompts), guard) as progress:
                capture = CaptureRun(
                    session,
                    prompts,
                    guard,
                    output_rows=job.output_rows,
                    wants_stop=lambda: interruption.requested,
                    on_sample=lambda captured: progress.show(capture.tally),
                )
                tally = capture.run(job.in_flight)
                return tally, progress.seconds
        finally:
            session.close()


def _say_stopping() -> None:
    notes().print("\ninterrupted: what is in flight ends first; Ctrl-C again ends at once")


def _show(job: _Job, report: dict[str, Any], as_json: bool, stdout: TextIO) -> None:
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
