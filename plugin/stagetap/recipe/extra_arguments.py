"""What a recipe hands on as it is: it may neither say again what a key says, nor change what the
checks count with. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagetap.findings import Finding
from stagetap.protected import contradictions
from stagetap.recipe.commands import ENGINE_KEYS, train_command
from stagetap.recipe.document import Engines, Recipe
from stagetap.wording import shown

_TARGET = "what an engine runs is read from the target's config.json; change it there"
_REPLICA = "name each replica in engines.nodes as an engine of its own"
_CONTEXT = "a token's states would be spread over ranks, which StageTap refuses"

UNCOUNTED = {
    **dict.fromkeys(("--dtype", "--hf-overrides", "--hf-config-path", "--config-format"), _TARGET),
    **dict.fromkeys(("--revision", "--code-revision"), _TARGET),
    **dict.fromkeys(
        (
            "--data-parallel-size",
            "-dp",
            "--data-parallel-size-local",
            "--data-parallel-rank",
            "--data-parallel-start-rank",
        ),
        _REPLICA,
    ),
    **dict.fromkeys(("--prefill-context-parallel-size", "-pcp"), _CONTEXT),
    **dict.fromkeys(("--decode-context-parallel-size", "-dcp"), _CONTEXT),
    "--config": "write what the file says into engines.extra-args",
}
"""Flags of vLLM by which the sums of a recipe would be those of another engine -> the cure."""

_BATCHED = "--max-num-batched-tokens"


def check_extra_arguments(recipe: Recipe, draft: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether arguments that are handed on say again what a key of the recipe says."""
    said = [*contradictions(recipe.engines.extra_args, ENGINE_KEYS)]
    whole = train_command(recipe, draft)
    own = whole[: len(whole) - len(recipe.trainer.extra_args)]
    flags = {each: f"the recipe's own {each}" for each in own if each.startswith("--")}
    said += contradictions(recipe.trainer.extra_args, flags)
    for options, places in (
        (
            recipe.store.options,
            {"global_segment_size": "store.segment-bytes", "host": "the nodes"},
        ),
        (recipe.engines.options, {"layers": "engines.layers", "store": "store"}),
    ):
        said += [(name, place) for name, place in places.items() if name in options]
    for argument, place in said:
        yield Finding(
            "protected keys",
            f"{argument} among options or extra arguments contradicts {place}",
            f"remove it, and change {place} instead",
        )
    uncounted = [*contradictions(recipe.engines.extra_args, UNCOUNTED)]
    for argument, cure in uncounted:
        yield Finding(
            "protected keys",
            f"{argument} among engines.extra-args would make another engine of the one that is "
            "checked here",
            f"remove it; {cure}",
        )
    yield from _check_batched_tokens(recipe)
    if not said and not uncounted:
        yield Finding("protected keys", "no further argument says what a key of the recipe says")


def has_expert_parallel(engines: Engines) -> bool:
    """Whether whole experts are on a rank, which divides other things than slices of each."""
    flags = dict.fromkeys(("--enable-expert-parallel", "-ep"), "")
    return any(contradictions(engines.extra_args, flags))


def _check_batched_tokens(recipe: Recipe) -> Iterator[Finding]:
    """A step has room for a token of every sequence, or vLLM does not start."""
    arguments = recipe.engines.extra_args
    for argument, _ in contradictions(arguments, {_BATCHED: _BATCHED}):
        value = _value(arguments, argument)
        sequences = recipe.engines.max_num_seqs
        cure = None
        if not (value.isascii() and value.isdigit()):
            cure = "write it as a plain number of tokens"
        elif len(value) > 10 or int(value) < sequences:
            cure = f"set it to a number from {sequences}, or a lower engines.max-num-seqs"
        yield Finding(
            "step and sequences",
            f"a step has up to {shown(value)} tokens ({_BATCHED}), an engine runs {sequences} "
            "sequences (engines.max-num-seqs)",
            cure,
        )


def _value(arguments: Sequence[str], argument: str) -> str:
    """What stands behind ``=``, or next; empty where nothing does."""
    _, equals, value = argument.partition("=")
    if equals:
        return value
    return next(iter(arguments[arguments.index(argument) + 1 :]), "")
