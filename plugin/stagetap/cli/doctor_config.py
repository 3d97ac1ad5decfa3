"""``stagetap doctor --config FILE``: are the settings of a server right for each other?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagetap.cli.model_facts import ModelFacts, model_facts, read_config
from stagetap.cli.packages import cure_of
from stagetap.config_file import config_file, read_config_file
from stagetap.config_values import MAX_SIZE, ConfigValues
from stagetap.errors import Refused, StageTapError
from stagetap.findings import SEE_FOUND, Finding
from stagetap.incompatible import check_features
from stagetap.layer_choice import choose_layers, read_draft
from stagetap.models import resolve_model
from stagetap.options import CONNECTOR_NAME, ConnectorOptions, connector_options
from stagetap.plan.couplings import (
    MASTER_LEASE_S,
    Expected,
    Served,
    check_draft,
    check_hosts,
    check_memory,
    check_times,
)
from stagetap.plan.layout import check_layout
from stagetap.plan.parallel import Parallel
from stagetap.recipe.commands import DRAFT_TYPE
from stagetap.stores.mooncake_uri import is_mooncake, parse_seconds, parse_size, parse_uri
from stagetap.training.acceptance import check_built
from stagetap.wording import one_line, shortened, shown

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs


_OPTIONS = {"--tp": "tensor-parallel-size", "--max-len": "max-model-len"}


@dataclass(frozen=True)
class Expectations:
    """What the options of the command say, as they stand there."""

    draft: Path | None = None
    lent: str | None = None
    lease: str | None = None
    consume_time: str | None = None
    tokens_in_flight: int | None = None

    def read(self) -> Expected:
        """Sizes and times as numbers. Raises Refused, naming the option."""
        lease = _number("--lease", self.lease, parse_seconds)
        return Expected(
            lease_s=MASTER_LEASE_S if lease is None else lease,
            lent_bytes=_number("--lent", self.lent, parse_size),
            tokens_in_flight=self.tokens_in_flight,
            consume_s=_number("--consume-time", self.consume_time, parse_seconds),
        )


def check_config(file: Path, expectations: Expectations) -> Iterator[Finding]:
    """What of the file's settings does not go together; why they cannot be read, where they cannot.

    Raises:
        Refused: a number of the command line cannot be read.
    """
    expected = expectations.read()
    try:
        yield from _checked(file, expectations.draft, expected)
    except StageTapError as error:
        yield Finding("configuration", one_line(error), SEE_FOUND)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "stagetap"):
            raise
        yield Finding("configuration", f"{package} is not installed", cure_of(package))


def _checked(file: Path, draft: Path | None, expected: Expected) -> Iterator[Finding]:
    if not os.path.isfile(file):
        raise Refused(
            f"{shortened(str(file), 200)} is no file; give one for vllm serve --config, or a recipe"
        )
    from stagetap.engine.parallel import check_parallel
    from stagetap.engine.serve_file import asked_features, read_serve_file

    arguments = read_serve_file(file)
    _check_counts(file, arguments)
    check_parallel(arguments)
    check_features(asked_features(arguments))
    for name in ("hf_overrides", "hf_config_path"):
        if getattr(arguments, name):
            raise Refused(
                f"{file}: {name.replace('_', '-')} makes another model of the one whose "
                "config.json is read here; change that file instead"
            )
    model = resolve_model(arguments.model)
    facts = model_facts(model)
    options = _options(file, arguments, facts)
    served = _served(arguments, options, facts)
    if (config := read_config(model)) is not None:
        parallel = Parallel(
            pp=arguments.pipeline_parallel_size,
            tp=arguments.tensor_parallel_size,
            expert_parallel=arguments.enable_expert_parallel,
        )
        where = f"config.json of {shortened(model, 200)}"
        check_layout(config, where, parallel, served.max_len, _OPTIONS)
    captured = ",".join(map(str, served.layer_ids))
    yield Finding("configuration", f"{file}: {arguments.model}, layers {captured}")
    if draft is not None:
        yield from _check_draft(served, draft)
    if is_mooncake(options.store):
        store = parse_uri(options.store)
        yield from check_hosts(served, store)
        yield from check_memory(served, store, expected)
        yield from check_times(served, store, expected)


def _check_counts(file: Path, arguments: AsyncEngineArgs) -> None:
    """What vLLM's parser takes for a number, and its engine does not. Raises Refused."""
    for name, least in (
        ("pipeline_parallel_size", 1),
        ("tensor_parallel_size", 1),
        ("data_parallel_size", 1),
        ("decode_context_parallel_size", 1),
        ("prefill_context_parallel_size", 1),
        ("block_size", 1),
        ("nnodes", 1),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 1),
        ("max_model_len", -1),  # which leaves it to vLLM
    ):
        value = getattr(arguments, name)
        if value is not None and (not least <= value <= MAX_SIZE or value == 0):
            flag = name.replace("_", "-")
            raise Refused(f"{file}: {flag} is {shown(value)}; give a number from 1 to {MAX_SIZE}")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        raise Refused(
            f"{file}: node-rank is {arguments.node_rank}, nnodes {arguments.nnodes}; count from 0"
        )
    batched, sequences = arguments.max_num_batched_tokens, arguments.max_num_seqs
    if batched is not None and sequences is not None and batched < sequences:
        raise Refused(
            f"{file}: max-num-batched-tokens is {batched}, max-num-seqs {sequences}; give a step "
            "room for a token of every sequence"
        )
    if arguments.nnodes > arguments.pipeline_parallel_size * arguments.tensor_parallel_size:
        raise Refused(
            f"{file}: nnodes is {arguments.nnodes}, more than pipeline-parallel-size times "
            "tensor-parallel-size; give each host a rank"
        )


def _options(file: Path, arguments: AsyncEngineArgs, facts: ModelFacts) -> ConnectorOptions:
    transfer = arguments.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR_NAME:
        raise Refused(
            f"{file} starts a vLLM that captures nothing; say stagetap-layers and stagetap-store"
        )
    extra: dict[str, Any] = dict(transfer.kv_connector_extra_config)
    if isinstance(extra.get("layers"), str):
        extra["layers"] = choose_layers(extra["layers"], facts.num_hidden_layers)
    return connector_options(extra)


def _served(arguments: AsyncEngineArgs, options: ConnectorOptions, facts: ModelFacts) -> Served:
    ids = choose_layers(list(options.layers), facts.num_hidden_layers)
    said = arguments.max_model_len  # -1 leaves it to vLLM
    return Served(
        layer_ids=ids,
        num_hidden_layers=facts.num_hidden_layers,
        token_bytes=facts.row_bytes(len(ids), arguments.dtype),
        max_len=said if said and said > 0 else facts.max_len,
        max_num_seqs=arguments.max_num_seqs,
        workers=arguments.pipeline_parallel_size * arguments.tensor_parallel_size,
        hosts=arguments.nnodes,
        publish_timeout_s=options.publish_timeout_s,
    )


def _check_draft(served: Served, draft: Path) -> Iterator[Finding]:
    where = str(draft)
    yield from check_draft(served, read_draft(where, served.num_hidden_layers), where)
    config = read_config_file(config_file(where))
    if ConfigValues(config, where).text("model_type") == DRAFT_TYPE:
        yield from check_built(where, config)


def _number(option: str, text: str | None, read: Any) -> Any:
    try:
        return None if text is None else read(text)
    except ValueError as error:
        raise Refused(f"{option}: {error}") from None
