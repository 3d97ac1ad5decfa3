"""Whether the values of a recipe go together. Pure.

Each rule names the two values that it compares, and what to change.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stagetap.config_values import ConfigValues
from stagetap.findings import Finding
from stagetap.options import ConnectorOptions
from stagetap.plan.couplings import (
    Expected,
    Served,
    bytes_in_flight,
    check_copies,
    check_draft,
    check_hosts,
    check_times,
)
from stagetap.recipe.document import Recipe, seconds
from stagetap.recipe.draft import check_target
from stagetap.recipe.extra_arguments import check_extra_arguments
from stagetap.recipe.nodes import same_node
from stagetap.stores.mooncake_uri import MooncakeOptions
from stagetap.taps import STREAM_MIXTURE, STREAM_PREFIX_SUM, stream_of_k3_draft
from stagetap.wording import counted, plain

_LEAST_LEASE_S = 0.001
"""What ``stagetap store up --lease-ms`` takes."""

BLOCKS = 2
"""A draft is supervised in the block that begins at an anchor. Of loss tokens in one piece, one
block's worth has a single anchor with a whole block, and two have one at every place of a block."""


@dataclass(frozen=True)
class Told:
    """What a recipe's files say.

    Attributes:
        served: what each engine captures, and its bounds.
        options: of the engines' connectors.
        store: the store's address.
        draft: the draft's config.json.
        draft_ids: taps that the draft reads.
        hidden_size: of the target; None where its config.json does not say it.
        vocab_size: likewise.
        has_attention_residuals: whether the target is a Kimi-K3.
    """

    served: Served
    options: ConnectorOptions
    store: MooncakeOptions
    draft: Mapping[str, Any]
    draft_ids: tuple[int, ...]
    hidden_size: int | None
    vocab_size: int | None
    has_attention_residuals: bool


def check_recipe(recipe: Recipe, told: Told) -> Iterator[Finding]:
    """All rules. Raises Refused for a time or a value of the draft that cannot be read."""
    yield check_gpus(recipe)
    yield check_tensor_parallel(recipe)
    yield from check_extra_arguments(recipe, told.draft)
    yield from check_target(told.draft, recipe.draft, told.hidden_size, told.vocab_size)
    yield from check_taps(recipe, told)
    yield check_stream(recipe, told)
    yield check_captures(told.options)
    yield check_blocks(recipe, told.draft)
    yield check_lengths(recipe)
    yield from check_segments(recipe, told)
    expected = Expected(
        lease_s=seconds("store.lease", recipe.store.lease),
        consume_s=seconds("expected.consume-time", recipe.expected.consume_time),
    )
    yield from check_hosts(told.served, told.store)
    yield from check_times(told.served, told.store, expected)
    yield check_lease(expected)
    yield from check_fetch_wait(recipe, told.options, expected)


def check_gpus(recipe: Recipe) -> Finding:
    """Whether GPUs and nodes sum up to what the recipe is for."""
    check = "GPUs and nodes"
    engines, trainer = recipe.engines, recipe.trainer
    named = [*recipe.engine_nodes, *trainer.nodes]
    for_engines = len(recipe.engine_nodes) * engines.gpus_per_node
    for_trainer = len(trainer.nodes) * trainer.gpus_per_node
    gpus = for_engines + for_trainer
    found = (
        f"engines have {for_engines} GPUs and the trainer {for_trainer}, on "
        f"{counted(len(named), 'node')}; the recipe is for {recipe.gpus} on {recipe.nodes}"
    )
    meant = [same_node(node) for node in named]
    often = Counter(meant)
    twice = [node for node, same in zip(named, meant, strict=True) if often[same] > 1]
    if twice:
        return Finding(check, f"{found}; {twice[0]} is named twice", "name each node once")
    if (gpus, len(named)) == (recipe.gpus, recipe.nodes):
        return Finding(check, found)
    return Finding(check, found, f"say gpus: {gpus} and nodes: {len(named)}, or name other nodes")


def check_tensor_parallel(recipe: Recipe) -> Finding:
    """Whether stages of ``tp`` ranks fill every engine's GPUs."""
    check = "world size and TP"
    engines = recipe.engines
    sizes = {len(nodes) * engines.gpus_per_node for nodes in engines.nodes}
    if len(sizes) > 1:
        few, *_, many = sorted(sizes)
        found = f"one engine has {few} GPUs and another {many}, with the same pp and tp"
        return Finding(check, found, "give every engine as many nodes")
    (world,) = sizes
    found = f"each engine has {world} GPUs, pp {engines.pp} times tp {engines.tp} are "
    found += str(engines.pp * engines.tp)
    if world == engines.pp * engines.tp:
        return Finding(check, found)
    even = world % engines.pp == 0
    cure = f"set tp to {world // engines.pp}" if even else f"set pp to a divisor of {world}"
    return Finding(check, found, cure)


def check_taps(recipe: Recipe, told: Told) -> Iterator[Finding]:
    """Whether the engines capture what the draft reads, and the last layer for its targets."""
    last = told.served.num_hidden_layers
    assert last is not None, "the target's config.json was read"
    where = recipe.draft
    if isinstance(layers := told.draft.get("target_layer_ids"), list):
        where += f" (target_layer_ids {','.join(map(str, layers))}, one less than taps)"
    wanted = tuple(dict.fromkeys((*told.draft_ids, last)))
    yield from check_draft(told.served, wanted, f"{where} and its targets")


def check_stream(recipe: Recipe, told: Told) -> Finding:
    """Whether the engines' stream is the one that the draft reads, and one of the target."""
    check = "stream and draft"
    stream = recipe.engines.stream
    fc_norm = ConfigValues(told.draft, recipe.draft).flag("fc_norm")
    reads = stream_of_k3_draft(fc_norm)
    found = (
        f"engines.stream is {stream}, {recipe.draft} (fc_norm {str(fc_norm).lower()}) reads {reads}"
    )
    if stream != reads:
        other = str(not fc_norm).lower()
        return Finding(check, found, f"set engines.stream to {reads}, or fc_norm to {other}")
    if stream == STREAM_PREFIX_SUM:
        found += ", whose last tap is not what the target's head reads"
        cure = f"set fc_norm to true and engines.stream to {STREAM_MIXTURE}, which gives targets"
        return Finding(check, found, cure)
    if not told.has_attention_residuals:
        found += f"; the target {recipe.target} has one residual stream"
        return Finding(check, found, "name the target that this draft is for")
    return Finding(check, found)


def check_captures(options: ConnectorOptions) -> Finding:
    """Whether each prompt that the engines run becomes a sample, and one that can be trained on."""
    found = (
        f"engines.options: export_default is {options.export_default}, "
        f"on_nonfinite {options.on_nonfinite}"
    )
    cure = None
    if options.export_default != "on":
        cure = (
            'set export_default to "on": the trainer would wait for prompts that do not ask to be '
            "captured"
        )
    elif options.on_nonfinite != "fail":
        cure = "set on_nonfinite to fail: a draft would be trained on NaN and Inf"
    return Finding("captured prompts", found, cure)


def check_blocks(recipe: Recipe, draft: Mapping[str, Any]) -> Finding:
    """Whether a row that is trained on supervises whole blocks."""
    block = ConfigValues(draft, recipe.draft).size("block_size")
    least, batch = recipe.trainer.min_loss_tokens, recipe.trainer.total_seq_len
    cure = None
    if least < BLOCKS * block:
        cure = f"set trainer.min-loss-tokens to {BLOCKS * block}, {BLOCKS} blocks"
    elif least > batch:
        cure = f"set trainer.min-loss-tokens below {batch} (trainer.total-seq-len): no row is left"
    return Finding(
        "blocks and loss tokens",
        f"rows with fewer than {least} loss tokens are left out, {recipe.draft} drafts blocks of "
        f"{block}",
        cure,
    )


def check_lengths(recipe: Recipe) -> Finding:
    """Whether the engines take rows as long as a trainer's batch, and a batch the longest sample.

    A request needs room for one token of output, also when it ends with its prompt.
    """
    longest, batch = _longest_sample(recipe), recipe.trainer.total_seq_len
    cure = None
    if longest > batch:
        cure = f"set trainer.total-seq-len to {longest}: longer samples would be cut"
    elif longest < batch:
        cure = f"set engines.max-len to {batch + 1}: longer rows would be refused"
    return Finding(
        "sample and batch",
        f"a sample has up to {longest:,} tokens (engines.max-len - 1), a row of "
        f"trainer.total-seq-len {batch:,}",
        cure,
    )


def _longest_sample(recipe: Recipe) -> int:
    return recipe.engines.max_len - 1


def check_segments(recipe: Recipe, told: Told) -> Iterator[Finding]:
    """Whether the lent memory holds what is in flight, and as much is said to be in flight."""
    engines = recipe.engines
    tokens = recipe.expected.tokens_in_flight
    longest = _longest_sample(recipe)
    running = len(engines.nodes) * engines.max_num_seqs * longest
    yield Finding(
        "tokens in flight",
        f"engines hold up to {running:,} tokens ({len(engines.nodes)} x {engines.max_num_seqs} "
        f"samples of {longest:,}), expected in flight are {tokens:,}",
        f"set expected.tokens-in-flight to at least {running}, or a lower engines.max-num-seqs"
        if running > tokens
        else None,
    )
    token_bytes = told.served.token_bytes
    assert token_bytes is not None, "the target's config.json was read"
    segments = len(recipe.trainer.nodes)
    needed, flight = bytes_in_flight(tokens, token_bytes, told.store)
    lent = segments * recipe.store.segment_bytes
    yield Finding(
        "segments and bytes in flight",
        f"{flight}; {counted(segments, 'node')} lend {recipe.store.segment_bytes:,} B each",
        f"set store.segment-bytes to at least {-(-needed // segments)}, or expected."
        f"tokens-in-flight to at most {lent // (token_bytes * told.store.replicas)}"
        if needed > lent
        else None,
    )
    yield from check_copies(told.store, segments)


def check_lease(expected: Expected) -> Finding:
    """Whether a sample that a reader has asked for stays until it is consumed."""
    consume = expected.consume_s or 0.0
    least = max(consume, _LEAST_LEASE_S)
    return Finding(
        "lease and consume time",
        f"a lease lasts {plain(expected.lease_s)} s, a sample is removed {plain(consume)} s after "
        "its commit",
        f"set store.lease to at least {plain(least)}s: whoever cleans the store up could take what "
        "is being consumed"
        if expected.lease_s < least
        else None,
    )


def check_fetch_wait(
    recipe: Recipe, options: ConnectorOptions, expected: Expected
) -> Iterator[Finding]:
    """Whether the trainer waits as long for a sample as that may take to come."""
    wait = seconds("trainer.fetch-wait", recipe.trainer.fetch_wait)
    publish, consume = options.publish_timeout_s, expected.consume_s or 0.0
    yield Finding(
        "fetch wait and publishing",
        f"the trainer waits {plain(wait)} s for a sample, which may be committed "
        f"{plain(publish)} s after its request ended (publish_timeout_s)",
        f"set trainer.fetch-wait above {plain(publish)}s: the trainer would give up on samples "
        "that come"
        if wait <= publish
        else None,
    )
    yield Finding(
        "fetch wait and consume time",
        f"the trainer waits {plain(wait)} s for a sample, a full store takes it when another is "
        f"removed, {plain(consume)} s after its commit",
        f"set trainer.fetch-wait above {plain(consume)}s, or expected.consume-time below "
        f"{plain(wait)}s"
        if wait <= consume
        else None,
    )
