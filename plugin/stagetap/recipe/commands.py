"""The command lines that a recipe stands for, node by node. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

from stagetap.protected import PROTECTED
from stagetap.recipe.document import Recipe, seconds
from stagetap.recipe.draft import mask_token
from stagetap.recipe.nodes import in_address
from stagetap.stores.mooncake_processes import lending_arguments
from stagetap.stores.mooncake_uri import MooncakeOptions, parse_uri
from stagetap.taps import MIXTURE_ENV, STREAM_MIXTURE, STREAM_PREFIX_SUM
from stagetap.wording import plain

DRAFT_TYPE = "k3_dspark"
"""What a recipe trains. Drafts of other types take their shape from further flags."""

MASTER_PORT = 50051
_LENDER_PORT = 50052
_TORCHRUN_PORT = 29500

_KEYS = {
    "MODEL": "target",
    "--pp": "engines.pp",
    "--tp": "engines.tp",
    "--max-len": "engines.max-len",
    "--layers": "engines.layers",
    "--store": "store",
    "--layers and --store": "engines.layers and store",
    **dict.fromkeys(("--host", "--nnodes", "--node-rank", "--master-addr"), "engines.nodes"),
}
"""Options of ``stagetap serve`` -> the key of a recipe that they are made of."""

ENGINE_KEYS = {
    **{flag: _KEYS.get(place, f"{place} of stagetap serve") for flag, place in PROTECTED.items()},
    "--max-num-seqs": "engines.max-num-seqs",
    "--stagetap-options": "engines.options",
    **dict.fromkeys(
        ("--enable-expert-parallel", "--no-enable-expert-parallel", "-ep"),
        "engines.expert-parallel",
    ),
}
"""Flags of vLLM that an engine's further arguments may not say -> what says them."""


@dataclass(frozen=True)
class Start:
    """One program to start.

    Attributes:
        node: where.
        role: what it is.
        command: program and arguments.
        environment: variables that it needs beside those that it sets itself.
    """

    node: str
    role: str
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """As a shell takes it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])


def store_uri(recipe: Recipe) -> str:
    """The store's address, the same for engines and trainer. The engines' workers lend nothing."""
    given = {name: _word(value) for name, value in recipe.store.options.items()}
    options = {"global_segment_size": "0", **given}
    run = quote(recipe.store.run, safe="")
    return f"mooncake://{_master(recipe)}/{run}?{urlencode(options)}"


def starts(recipe: Recipe, draft: Mapping[str, object]) -> list[Start]:
    """Everything to start, in this order; ``draft`` is what the draft's config.json holds."""
    uri = store_uri(recipe)
    return [
        Start(recipe.trainer.nodes[0], "prompts", _prompts_command(recipe)),
        _master_start(recipe),
        *_lenders(recipe, parse_uri(uri)),
        *_engines(recipe, uri),
        *(
            Start(node, f"trainer {rank}", _torchrun(recipe, rank) + train_command(recipe, draft))
            for rank, node in enumerate(recipe.trainer.nodes)
        ),
    ]


def train_command(recipe: Recipe, draft: Mapping[str, object]) -> list[str]:
    """``stagetap train``, the same on every rank. One epoch: what was read leaves the store."""
    trainer = recipe.trainer
    return [
        *("stagetap", "train", "--speculator-type", DRAFT_TYPE),
        *("--draft-config", recipe.draft, "--verifier-name-or-path", recipe.target),
        # speculators would look for it in the target's tokenizer.
        *("--mask-token-id", str(mask_token(draft, recipe.draft))),
        *("--hidden-states-backend", "stagetap", "--stagetap-store", store_uri(recipe)),
        *("--stagetap-wait-s", f"{plain(seconds('trainer.fetch-wait', trainer.fetch_wait))}"),
        *("--stagetap-min-loss-tokens", str(trainer.min_loss_tokens)),
        *("--stagetap-after-read", "remove", "--epochs", "1"),
        *("--data-path", trainer.rows, "--save-path", trainer.save_path, "--fsdp-shard"),
        *_order(recipe),
        *trainer.extra_args,
    ]


def _prompts_command(recipe: Recipe) -> list[str]:
    trainer = recipe.trainer
    return [
        *("stagetap", "train-prompts", trainer.rows, "--out", trainer.prompts),
        *("--ranks", str(len(trainer.nodes) * trainer.gpus_per_node)),
        *("--min-loss-tokens", str(trainer.min_loss_tokens), *_order(recipe)),
    ]


def _order(recipe: Recipe) -> list[str]:
    """What the trainer's order of rows hangs on."""
    trainer = recipe.trainer
    return [
        *("--total-seq-len", str(trainer.total_seq_len), "--seed", str(trainer.seed)),
        *("--train-data-ratio", str(trainer.train_data_ratio)),
    ]


def _master_start(recipe: Recipe) -> Start:
    node = recipe.trainer.nodes[0]
    lease_ms = round(seconds("store.lease", recipe.store.lease) * 1000)
    port = ("--port", str(MASTER_PORT))
    command = [
        "stagetap",
        "store",
        "up",
        "--host",
        in_address(node),
        *port,
        "--lease-ms",
        str(lease_ms),
    ]
    return Start(node, "store", command)


def _lenders(recipe: Recipe, store: MooncakeOptions) -> list[Start]:
    size = recipe.store.segment_bytes
    return [
        Start(
            node,
            f"memory {number}",
            [
                "mooncake_client",
                *lending_arguments(store, size, in_address(node), _LENDER_PORT),
            ],
        )
        for number, node in enumerate(recipe.trainer.nodes)
    ]


def _engines(recipe: Recipe, uri: str) -> list[Start]:
    engines = recipe.engines
    variables = {STREAM_MIXTURE: "1", STREAM_PREFIX_SUM: "0"}
    environment = {MIXTURE_ENV: variables[engines.stream]} if engines.stream in variables else {}
    options = ["--stagetap-options", json.dumps(engines.options)] if engines.options else []
    experts = ["--enable-expert-parallel"] if engines.expert_parallel else []
    return [
        Start(
            node,
            f"engine {number}, node {rank}",
            [
                *("stagetap", "serve", recipe.target, "--layers", engines.layers, "--store", uri),
                *("--pp", str(engines.pp), "--tp", str(engines.tp)),
                *("--max-len", str(engines.max_len)),
                *(("--host", node) if rank == 0 else ()),
                *(("--nnodes", str(len(nodes)), "--node-rank", str(rank)) if nodes[1:] else ()),
                *(("--master-addr", nodes[0]) if nodes[1:] else ()),
                *("--", "--max-num-seqs", str(engines.max_num_seqs), *options),
                *experts,
                *engines.extra_args,
            ],
            environment,
        )
        for number, nodes in enumerate(engines.nodes)
        for rank, node in enumerate(nodes)
    ]


def _torchrun(recipe: Recipe, rank: int) -> list[str]:
    trainer = recipe.trainer
    return [
        *("torchrun", "--nnodes", str(len(trainer.nodes)), "--node-rank", str(rank)),
        *("--nproc-per-node", str(trainer.gpus_per_node), "--master-addr", trainer.nodes[0]),
        *("--master-port", str(_TORCHRUN_PORT), "--no-python"),
    ]


def _master(recipe: Recipe) -> str:
    return f"{in_address(recipe.trainer.nodes[0])}:{MASTER_PORT}"


def _word(value: str | bool | int | float) -> str:
    """A value as an address writes it: YAML has made a switch of ``on``."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
