"""``stagetap equivalence``: is what several stages capture what one stage captures?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stagetap.cli.arguments import (
    EngineArgOption,
    JsonOption,
    LayersOption,
    ModelOption,
    TpOption,
    agreed,
    agreed_max_len,
    agreed_ranks,
    engine_arguments,
)
from stagetap.cli.folders import make_folder, temporary_folder
from stagetap.cli.interrupt import termination_interrupts
from stagetap.cli.output import activity, notes, print_json, results, table
from stagetap.errors import Refused
from stagetap.layer_choice import choose_layers
from stagetap.models import resolve_model

if TYPE_CHECKING:
    from stagetap.equivalence.prove import Proof

SHOWN_FINDINGS = 20


def equivalence_command(
    model: ModelOption,
    layers: LayersOption,
    pp: Annotated[int, typer.Option("--pp", min=1, help="Stages to compare with one.")] = 2,
    tp: TpOption = 1,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSONL as for capture; default: made up.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", help="Tokens of each made-up prompt; default 1,7,33,129,400."),
    ] = None,
    tolerant: Annotated[
        bool,
        typer.Option(
            "--tolerant", help="Let rows be off by 2 ULP; batching alone moves that much."
        ),
    ] = False,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Keep datasets, prompts and logs in this folder.")
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            "--reference", help="Compare with this dataset, captured at --pp 1 before: KEEP/pp1."
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", help="Layers of each stage, such as 10,20.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option("--max-num-batched-tokens", min=1, help="Tokens a step: forces chunks."),
    ] = None,
    engine_arg: EngineArgOption = None,
    as_json: JsonOption = False,
) -> None:
    """Capture the same prompts on several stages and on one, and compare bit by bit.

    Both arms go through the production connector and reader, each in its own process, one request
    at a time. Exit code 0 only when every tensor is bitwise equal, or tolerable with --tolerant.
    """
    from stagetap.cli.model_facts import model_facts

    model = resolve_model(model)
    facts = model_facts(model)  # a wrong path is told before a package that is missing
    from stagetap.cli.tokenized import load_prompts
    from stagetap.equivalence.arms import Arm
    from stagetap.equivalence.made_prompts import DEFAULT_LENGTHS, parse_lengths, prompts_of_lengths
    from stagetap.equivalence.prove import check_arm, prove
    from stagetap.partition import parse_partition

    if facts.num_hidden_layers is None or facts.vocab_size is None:
        raise Refused(
            f"the config.json of {model} is not on this machine, or tells neither layers nor "
            "vocabulary; give a checkpoint folder"
        )
    engine_args = engine_arguments(engine_arg)
    agreed_ranks(engine_args, pp, tp)
    batched = agreed(
        engine_args, "max_num_batched_tokens", "--max-num-batched-tokens", max_num_batched_tokens
    )
    if batched is not None:
        engine_args["max_num_batched_tokens"] = batched
    arm = Arm(
        model=model,
        layers=choose_layers(layers, facts.num_hidden_layers),
        pp=pp,
        tp=tp,
        partition=None if partition is None else parse_partition(partition),
        engine_args=engine_args,
    )
    check_arm(arm, facts.num_hidden_layers)
    if prompts is not None and lengths is not None:
        raise Refused("--prompts and --lengths exclude each other; drop one")
    if prompts is not None:
        chosen = load_prompts(prompts, model)
    else:
        chosen = prompts_of_lengths(
            DEFAULT_LENGTHS if lengths is None else parse_lengths(lengths), facts.vocab_size
        )
        longest = max(len(prompt.token_ids) for prompt in chosen)
        max_len = agreed_max_len(dict(engine_args), None) or facts.max_len
        if max_len is not None and longest >= max_len:
            raise Refused(
                f"--lengths {longest} and the token that the engine makes of each exceed the "
                f"longest sequence of {max_len} tokens; give shorter ones"
            )
    with _workplace(keep) as folder, activity() as notify:
        proof = prove(
            arm,
            chosen,
            facts.num_hidden_layers,
            candidate=folder / f"pp{pp}",
            reference=reference or folder / "pp1",
            reuse_reference=reference is not None,
            scratch=folder,
            notify=notify,
        )
        document = _document(arm, proof, tolerant, kept=keep is not None)
    if as_json:
        print_json(document)
    else:
        show_layers(proof, arm.layers)
        show_verdict(proof, tolerant)
    if not document["equal"]:
        raise typer.Exit(1)


def show_layers(proof: Proof, layer_ids: Sequence[int]) -> None:
    """A table with one row a layer on stdout."""
    stage_of = {layer: stage for stage, ids in proof.owners.items() for layer in ids}
    rows = table("layer", "stage", "tensors", "bitwise", "max_abs", "mean_abs", "relative", "ULP")
    for layer in layer_ids:
        tensors = [each.metrics for each in proof.comparison.tensors if each.layer == layer]
        found = proof.comparison.layer(layer)
        rows.add_row(
            str(layer),
            str(stage_of[layer]),
            str(len(tensors)),
            str(sum(each.bitwise for each in tensors)),
            f"{found.max_abs:.3g}",
            f"{found.mean_abs:.3g}",
            f"{found.max_relative:.3g}",
            f"{found.max_ulp:.0f}",
        )
    results().print(rows)


def show_verdict(proof: Proof, tolerant: bool) -> None:
    """One line on stdout; what differs on stderr before it."""
    comparison = proof.comparison
    findings = list(comparison.findings())
    for finding in findings[:SHOWN_FINDINGS]:
        notes().print(finding, soft_wrap=True)
    if len(findings) > SHOWN_FINDINGS:
        notes().print(f"and {len(findings) - SHOWN_FINDINGS} more")
    if comparison.bitwise:
        verdict = "bitwise equal to one stage"
    elif tolerant and comparison.tolerable:
        verdict = f"equal to one stage within the tolerance ({_tolerance()}), not bitwise"
    else:
        verdict = "not equal to one stage"
    results().print(verdict)


def _document(arm: Any, proof: Proof, tolerant: bool, kept: bool) -> dict[str, Any]:
    comparison = proof.comparison
    hidden = comparison.hidden
    findings = list(comparison.findings())
    return {
        "bitwise": comparison.bitwise,
        "equal": comparison.bitwise or (tolerant and comparison.tolerable),
        "tensors": len(comparison.tensors),
        "samples": comparison.samples,
        "max_abs": hidden.max_abs,
        "mean_abs": hidden.mean_abs,
        "max_relative": hidden.max_relative,
        "max_ulp": hidden.max_ulp,
        "differing": hidden.differing,
        "elements": hidden.elements,
        "pp": arm.pp,
        "tp": arm.tp,
        "layer_ids": list(arm.layers),
        "stages": {str(stage): ids for stage, ids in proof.owners.items()},
        "tolerant": tolerant,
        "tolerance": _tolerance() if tolerant else "bitwise",
        "findings": findings[:SHOWN_FINDINGS],
        "findings_total": len(findings),
        "model": arm.model,
        "reference": str(proof.reference) if kept else None,
        "candidate": str(proof.candidate) if kept else None,
    }


def _tolerance() -> str:
    from stagetap.equivalence.compare import TOLERATED_ULP

    return f"|a - b| of every row at most {TOLERATED_ULP} ULP of |b|"


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
            raise Refused(f"--keep {keep} is there and no empty folder; give a new one")
        make_folder(keep)
        with termination_interrupts():
            yield keep
        return
    with temporary_folder("stagetap-equivalence-") as folder:
        yield folder
