"""``stagetap doctor``: is this environment one in which a capture can start?"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from stagetap.cli.arguments import (
    EngineArgOption,
    JsonOption,
    TpOption,
    agreed_ranks,
    engine_arguments,
)
from stagetap.cli.output import activity, print_json, results, stdout_kept_clean, table
from stagetap.errors import Refused, StageTapError
from stagetap.findings import SEE_FOUND, Finding
from stagetap.layer_choice import HELP
from stagetap.wording import one_line, shortened

if TYPE_CHECKING:
    from rich.console import Console

    from stagetap.engine.capture.self_check import Verdict
    from stagetap.recipe.commands import Start

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "stagetap"


def doctor_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Look at this checkpoint as well: a folder, a Hugging Face name, or smollm2."
        ),
    ] = None,
    pp: Annotated[
        int | None,
        typer.Option(
            "--pp",
            min=1,
            help="Run the start-up self-check of the model on so many stages: where each tap is "
            "read, and that it is what the model's own tap code gives, or what its next layer "
            "reads. Weights are random, config.json is enough.",
        ),
    ] = None,
    tp: TpOption = 1,
    layers: Annotated[
        str | None, typer.Option("--layers", help=f"{HELP} Default: every id of the model.")
    ] = None,
    engine_arg: EngineArgOption = None,
    static: Annotated[
        bool,
        typer.Option("--static", help="Load neither torch nor vLLM, but for --config."),
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Check the settings of this file against each other: one for "
            "`vllm serve --config`, or a recipe, whose commands are then printed.",
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option("--draft", help="With --config: the config.json of the draft to be trained."),
    ] = None,
    lent: Annotated[
        str | None,
        typer.Option("--lent", metavar="SIZE", help="With --config: what `store up --lend` lends."),
    ] = None,
    lease: Annotated[
        str | None,
        typer.Option("--lease", metavar="TIME", help="With --config: the master's; default: 10s."),
    ] = None,
    consume_time: Annotated[
        str | None,
        typer.Option(
            "--consume-time",
            metavar="TIME",
            help="With --config: from a sample's commit to its removal, at the worst.",
        ),
    ] = None,
    tokens_in_flight: Annotated[
        int | None,
        typer.Option(
            "--tokens-in-flight",
            min=1,
            help="With --config: captured and not yet removed, at the worst; "
            "default: max-num-seqs times max-model-len.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check Python, torch, vLLM, the patch series, the plugin, the environment; and a checkpoint.

    vLLM is loaded, unless something is wrong already: it must know the connector and the flags.
    Exit code 1 when something is wrong; the table says the cure.
    """
    from stagetap.cli.doctor_config import Expectations
    from stagetap.cli.doctor_recipe import examine

    if pp is not None and model is None:
        raise Refused("--pp says on how many stages a model is checked: name the model as well")
    if pp is None and (layers is not None or tp > 1 or engine_arg):
        raise Refused(
            "--layers, --tp and --engine-arg are about the self-check: say on how many stages it "
            "shall run with --pp"
        )
    expectations = Expectations(draft, lent, lease, consume_time, tokens_in_flight)
    if config is None and expectations != Expectations():
        raise Refused("what is expected of a store and its consumers goes with --config FILE")
    engine_args = engine_arguments(engine_arg)
    if pp is not None:
        agreed_ranks(engine_args, pp, tp)
    with stdout_kept_clean() as stdout, activity() as notify:
        checks = STATIC_CHECKS if static else CHECKS
        findings = [finding for check in checks for finding in check()]
        loads = not static and all(finding.ok for finding in findings)
        about_model: list[Finding] = []
        if model is not None:
            unasked = None if loads else "--static" if static else "vLLM was not loaded"
            about_model += check_model(model, weights=pp is None, unasked=unasked)
        if loads:
            notify("loading vLLM")
            readable = model is not None and not any(each.check == "model" for each in about_model)
            findings += check_registered(model if readable else None)
        findings += about_model
        verdicts: list[Verdict] = []
        to_start: list[Start] = []
        if config is not None:
            about_config, to_start = examine(config, expectations)
            findings += about_config
        if model is not None and pp is not None and all(finding.ok for finding in findings):
            notify(f"self-check of {model} on {pp} stages")
            finding, verdicts = check_capture(model, pp, tp, layers, engine_args)
            findings.append(finding)
        _show(findings, verdicts, to_start, stdout if as_json else None, results(stdout))
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


def _show(
    findings: list[Finding],
    verdicts: list[Verdict],
    to_start: list[Start],
    json_to: TextIO | None,
    console: Console,
) -> None:
    if json_to is not None:
        document = {
            "ok": all(finding.ok for finding in findings),
            "checks": [{**asdict(each), "ok": each.ok} for each in findings],
            "taps": [asdict(each) for each in verdicts],
            "starts": [asdict(each) for each in to_start],
        }
        print_json(document, json_to)
        return
    if verdicts:
        taps = table("tap", "stage", "captured", "equal to", "rows")
        for each in verdicts:
            shape = f"{each.dtype} {list(each.shape)}"
            taps.add_row(
                str(each.layer_id), str(each.stage), each.captured, each.compared_with, shape
            )
        console.print(taps)
    rows = table("check", "", "found", "cure")
    for finding in findings:
        state = "ok" if finding.ok else "problem"
        rows.add_row(finding.check, state, finding.found, finding.cure or "")
    console.print(rows)
    for start in to_start:
        console.print(f"{start.node}: {start.role}\n    {start.line}", soft_wrap=True)


def check_python() -> Iterator[Finding]:
    """The interpreter."""
    found = ".".join(map(str, sys.version_info[:3]))
    old = sys.version_info < (3, 11)
    yield Finding(
        "python", f"{found} at {sys.executable}", "use Python 3.11 or newer" if old else None
    )


def check_torch() -> Iterator[Finding]:
    """Whether torch loads, and breaks nothing that loads beside it."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield Finding("torch", f"does not load: {one_line(error)}", "install torch with vLLM")
        return
    yield Finding("torch", str(torch.__version__))
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except (ImportError, OSError, RuntimeError) as error:
        # transformers imports it when it is there, and fails with it.
        yield Finding(
            "torchvision",
            f"does not load beside this torch: {one_line(error)}",
            "pip uninstall torchvision torchaudio torchcodec",
        )


def check_vllm() -> Iterator[Finding]:
    """Which vLLM, where, and whether it carries the series."""
    from stagetap import patchstack
    from stagetap.patchstack.locate import find_vllm

    try:
        package = find_vllm()
        yield Finding("vllm", f"{package.version} at {package.path}")
        found = patchstack.status()
    except StageTapError as error:
        yield Finding("vllm", one_line(error), f"{SEE_FOUND}; ./justw setup makes an environment")
        return
    state = f"{found.state}, {len(found.series.patches)} patches, {found.series.digest}"
    if found.foreign is not None:
        cure = f"{found.foreign}: reinstall vLLM {found.series.version}"
    elif found.state != "applied":
        cure = "run `stagetap patch apply`"
    else:
        cure = None
    yield Finding("patch series", state, cure)


def check_plugin() -> Iterator[Finding]:
    """Whether vLLM will load the plugin."""
    registered = [each for each in entry_points(group=PLUGIN_GROUP) if each.name == PLUGIN_NAME]
    if not registered:
        yield Finding(
            "plugin",
            f"no entry point {PLUGIN_NAME} in {PLUGIN_GROUP}",
            "install stagetap into this environment: pip install -e .",
        )
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    excluded = allowed is not None and PLUGIN_NAME not in allowed.split(",")
    yield Finding(
        "plugin",
        registered[0].value + (f", VLLM_PLUGINS={allowed}" if allowed is not None else ""),
        f"add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it" if excluded else None,
    )


def check_environment() -> Iterator[Finding]:
    """Variables of the caller that would stop a capture: what is set already is kept."""
    from stagetap.engine.environment import engine_environment, is_cpu_build

    wanted = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if is_cpu_build():
        wanted["TRITON_INTERPRET"] = "1"
    for name, value in wanted.items():
        given = os.environ.get(name)
        wrong = given is not None and given != value
        yield Finding(
            name,
            f"set to {given}" if given is not None else f"unset, commands set it to {value}",
            f"unset {name}" if wrong else None,
        )
    cores = len(os.sched_getaffinity(0))
    if is_cpu_build():
        bind = engine_environment(2, 1)["VLLM_CPU_OMP_THREADS_BIND"]
        yield Finding("cpu threads", f"{cores} cores; two stages run on {bind}")
    else:
        yield Finding("cpu threads", f"{cores} cores")


def check_model(name: str, weights: bool = True, unasked: str | None = None) -> Iterator[Finding]:
    """A checkpoint, without loading it.

    Args:
        weights: whether config.json alone is too little.
        unasked: why vLLM is not asked about the architecture; None where it is.
    """
    from stagetap.cli.model_facts import find_config, model_facts
    from stagetap.config_file import read_config_file
    from stagetap.config_values import ConfigValues
    from stagetap.models import resolve_model

    try:
        model = resolve_model(name)
        file = find_config(model)
        if file is None:
            cure = "download it, or give the folder of a checkpoint"
            yield Finding("model", f"{name} is not on this machine", cure)
            return
        values = ConfigValues(read_config_file(file), f"config.json of {name}")
        model_facts(model)  # for what it refuses
        architectures = values.texts("architectures")
    except StageTapError as error:
        yield Finding("model", one_line(error), SEE_FOUND)
        return
    if weights or any(file.parent.glob("*.safetensors")):
        yield _check_weights(file.parent)
    if not architectures:
        yield Finding("architecture", "none named", "name it in config.json")
        return
    aside = "" if unasked is None else f", not looked up in vLLM: {unasked}"
    yield Finding("architecture", f"{shortened(architectures[0])}{aside}")


def _check_weights(folder: Path) -> Finding:
    from stagetap.fingerprint import weights_fingerprint

    try:
        return Finding("weights", f"{folder}, {weights_fingerprint(folder)[:23]}")
    except StageTapError as error:
        return Finding(
            "weights",
            one_line(error),
            f"{SEE_FOUND}; --pp N checks the configuration alone, with random weights",
        )


def check_capture(
    model: str, pp: int, tp: int, layers: str | None, engine_args: dict[str, object]
) -> tuple[Finding, list[Verdict]]:
    """What the start-up self-check says of a model with random weights."""
    from stagetap.engine.rehearsal import rehearse
    from stagetap.models import resolve_model

    try:
        verdicts = rehearse(
            resolve_model(model), layers=layers, pp=pp, tp=tp, engine_args=engine_args
        )
    except StageTapError as error:
        return Finding("self-check", one_line(error), SEE_FOUND), []
    held = Counter(verdict.held for verdict in verdicts)
    found = ", ".join(f"{count} {how}" for how, count in held.items())
    return Finding("self-check", f"taps proven on {pp} stages: {found}"), verdicts


def check_registered(model: str | None = None) -> Iterator[Finding]:
    """What a vLLM that was loaded in a child process knows of StageTap, and of ``model``."""
    from stagetap.engine.environment import engine_environment
    from stagetap.models import resolve_model

    asked = [] if model is None else [resolve_model(model)]
    child = subprocess.run(
        [sys.executable, "-m", "stagetap.engine.registered", *asked],
        env={**os.environ, **engine_environment(1, 1)},
        capture_output=True,
        text=True,
    )
    if child.returncode != 0:
        said = child.stderr.strip().splitlines() or [f"exit code {child.returncode}"]
        yield Finding("vllm loads", said[-1], "import vllm in this environment to see why not")
        return
    for finding in json.loads(child.stdout.splitlines()[-1]):
        yield Finding(**finding)


STATIC_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    check_python,
    check_vllm,
    check_plugin,
    check_environment,
)
CHECKS = (*STATIC_CHECKS, check_torch)
