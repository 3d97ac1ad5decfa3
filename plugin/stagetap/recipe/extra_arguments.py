"""What a recipe hands on as it is: it may neither say again what a key or the draft says, nor
change what the checks count with. Pure.

One rule for every flag: what changes captured values, sums of memory or the layout of an engine is
a key of the recipe or refused. The rest, such as kernels, logs and loaders, is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stagetap.findings import Finding
from stagetap.incompatible import FEATURES
from stagetap.protected import contradictions
from stagetap.recipe.commands import ENGINE_KEYS, train_command
from stagetap.recipe.document import Recipe
from stagetap.wording import shown

_CHECK = "protected keys"

_TARGET = "what an engine runs is read from the target's config.json; change it there"
_CACHE = "states would be those of a cache of other precision; leave it to the target's config.json"
_REPLICA = "name each replica in engines.nodes as an engine of its own"
_CONTEXT = "a token's states would be spread over ranks, which StageTap refuses"
_EXPERTS = "experts would lie otherwise than the layout is checked for"

OTHER_ENGINE = {
    **dict.fromkeys(
        (
            *(
                "--dtype",
                "--quantization",
                "-q",
                "--quantization-config",
                "--disable-sliding-window",
            ),
            *("--hf-overrides", "--hf-config-path", "--config-format"),
            *("--revision", "--code-revision", "--model-impl", "--model-class-overrides"),
        ),
        _TARGET,
    ),
    **dict.fromkeys(
        (
            *("--kv-cache-dtype", "--kv-cache-dtype-skip-layers"),
            *("--mamba-cache-dtype", "--mamba-ssm-cache-dtype"),
            "--enable-mamba-cache-stochastic-rounding",
        ),
        _CACHE,
    ),
    "--kv-sharing-fast-prefill": "layers would skip tokens of the prompt, which are captured",
    **dict.fromkeys(
        (
            *("--data-parallel-size", "-dp", "--data-parallel-size-local"),
            *("--data-parallel-rank", "--data-parallel-start-rank", "--data-parallel-address"),
            *("--data-parallel-rpc-port", "--data-parallel-backend", "--data-parallel-hybrid-lb"),
            *("--data-parallel-external-lb", "--data-parallel-multi-port-external-lb"),
            "--enable-elastic-ep",
        ),
        _REPLICA,
    ),
    **dict.fromkeys(("--prefill-context-parallel-size", "-pcp"), _CONTEXT),
    **dict.fromkeys(("--decode-context-parallel-size", "-dcp"), _CONTEXT),
    **dict.fromkeys(("--enable-eplb", "--eplb-config"), _EXPERTS),
    "--distributed-executor-backend": "engines.nodes says where each of an engine's ranks runs",
    **{flag: feature.refused for feature in FEATURES for flag in feature.flags},
    "--config": "write what the file says into engines.extra-args",
}
"""Flags of vLLM that make another engine than is checked -> the cure, or why none does."""

_LOADERS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer")
"""Those of ``--load-format`` that read the target's own safetensors files."""

_BATCHED = "--max-num-batched-tokens"

_DRAFT = "the draft's config.json"

TRAINER_PLACES = {
    **dict.fromkeys(
        (
            *("--from-pretrained", "--target-layer-ids", "--block-size"),
            *("--num-layers", "--draft-arch", "--draft-hidden-act"),
            *("--draft-mrope-full-head-hack", "--no-draft-mrope-full-head-hack"),
            *("--token-freq-path", "--draft-vocab-size", "--d2t-path", "--t2d-path"),
            *("--norm-before-residual", "--no-norm-before-residual", "--fc-norm"),
            *("--norm-before-fc", "--no-norm-before-fc", "--norm-output", "--no-norm-output"),
            *("--embed-requires-grad", "--no-embed-requires-grad"),
            *("--sliding-window", "--full-attention-indices"),
            *("--sliding-window-non-causal", "--no-sliding-window-non-causal"),
            *("--sample-from-anchor", "--no-sample-from-anchor"),
            *("--markov-rank", "--markov-head-type"),
            *("--enable-confidence-head", "--no-enable-confidence-head"),
            *("--confidence-head-with-markov", "--no-confidence-head-with-markov"),
        ),
        _DRAFT,
    ),
    "--stagetap-stream": "engines.stream",
    "--stagetap-run": "store.run",
    "--stagetap-target": "target",
    **dict.fromkeys(
        (
            *("--hidden-states-path", "--mooncake-master", "--mooncake-metadata-server"),
            *("--mooncake-protocol", "--mooncake-device"),
            *("--mooncake-global-segment-gib", "--mooncake-local-buffer-gib"),
        ),
        "store",
    ),
}
"""Flags of the trainer that the recipe's command does not have, and a key or the draft decides."""

OTHER_TRAINING = {
    "--config": "write what the file says into trainer.extra-args",
    **dict.fromkeys(
        ("--dry-run", "--dump-config"), "the trainer would end before it reads what is captured"
    ),
}
"""Flags of the trainer that make another training than is checked -> the cure, or why none does."""

_STAGETAP = "--stagetap-"
_FREE = ("--stagetap-verify", "--stagetap-metrics")
"""Flags of StageTap's own that no key decides: how a sample is checked, where a curve is kept."""


def check_extra_arguments(recipe: Recipe, draft: Mapping[str, Any]) -> Iterator[Finding]:
    """Whether what is handed on says again what the recipe says, or changes what is checked."""
    engine, trainer = recipe.engines.extra_args, recipe.trainer.extra_args
    problems = [
        *_said_again(contradictions(engine, ENGINE_KEYS)),
        *_said_again(_trainer_contradictions(recipe, draft)),
        *_said_again(_options_said_again(recipe)),
        *_another("engine", "engines", contradictions(engine, OTHER_ENGINE)),
        *_another("training", "trainer", contradictions(trainer, OTHER_TRAINING)),
        *_check_loader(engine),
    ]
    yield from problems
    yield from _check_batched_tokens(recipe)
    if not problems:
        yield Finding(_CHECK, "no further argument says what a key of the recipe says")


def _said_again(said: Iterator[tuple[str, str]]) -> Iterator[Finding]:
    for argument, place in said:
        yield Finding(
            _CHECK,
            f"{argument} among options or extra arguments contradicts {place}",
            f"remove it, and change {place} instead",
        )


def _another(what: str, section: str, said: Iterator[tuple[str, str]]) -> Iterator[Finding]:
    for argument, cure in said:
        yield Finding(
            _CHECK,
            f"{argument} among {section}.extra-args would make another {what} than the one "
            "that is checked here",
            f"remove it; {cure}",
        )


def _trainer_contradictions(recipe: Recipe, draft: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What the recipe's own command says, what the draft and other keys decide, and the rest of
    StageTap's flags."""
    whole = train_command(recipe, draft)
    own = whole[: len(whole) - len(recipe.trainer.extra_args)]
    flags = {each: f"the recipe's own {each}" for each in own if each.startswith("--")}
    for argument in recipe.trainer.extra_args:
        found = next(contradictions([argument], {**TRAINER_PLACES, **flags}), None)
        if found is not None:
            yield found
        elif argument.startswith(_STAGETAP) and not _is_free(argument):
            yield argument, "the recipe's keys, of which StageTap's own flags are made"


def _is_free(argument: str) -> bool:
    """Whether a word is one of StageTap's free flags, or the beginning of one."""
    name = argument.partition("=")[0]
    return any(flag.startswith(name) for flag in _FREE)


def _options_said_again(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for options, places in (
        (
            recipe.store.options,
            {"global_segment_size": "store.segment-bytes", "host": "the nodes"},
        ),
        (
            recipe.engines.options,
            {"layers": "engines.layers", "store": "store", "run_id": "store.run"},
        ),
    ):
        yield from ((name, place) for name, place in places.items() if name in options)


def _check_loader(arguments: Sequence[str]) -> Iterator[Finding]:
    """Whether the weights that run are the target's own."""
    for argument, value in _values(arguments, "--load-format"):
        if value not in _LOADERS:
            yield Finding(
                _CHECK,
                f"{argument} among engines.extra-args says {shown(value)}, by which other weights "
                "than the target's safetensors files may run",
                f"remove it, or say one of {', '.join(_LOADERS)}",
            )


def _check_batched_tokens(recipe: Recipe) -> Iterator[Finding]:
    """A step has room for a token of every sequence, or vLLM does not start."""
    for _, value in _values(recipe.engines.extra_args, _BATCHED):
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


def _values(arguments: Sequence[str], flag: str) -> Iterator[tuple[str, str]]:
    """Each word that says a flag, and its value: behind ``=``, or next, or empty."""
    for position, argument in enumerate(arguments):
        if any(contradictions([argument], {flag: flag})):
            _, equals, value = argument.partition("=")
            yield argument, value if equals else next(iter(arguments[position + 1 :]), "")
