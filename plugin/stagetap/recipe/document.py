"""What a recipe says. Every key becomes part of a command (:mod:`stagetap.recipe.commands`), is a
sum that the others must come to, or an expectation that they are held against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec

from stagetap.config_values import MAX_SIZE
from stagetap.errors import Refused
from stagetap.recipe.nodes import check_node
from stagetap.stores.mooncake_uri import parse_seconds
from stagetap.wording import shown

MARKER = "stagetap-recipe"
"""The key that tells a recipe from a file for ``vllm serve --config``; its value is a version."""

OPEN = "???"
"""What stands in the place of a value that is only known where the recipe is used."""

Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_SIZE)]
Large = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Section(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename="kebab"
):
    """Keys are written with dashes."""


class Engines(_Section, frozen=True, kw_only=True):
    """``stagetap serve``, once an engine.

    Attributes:
        nodes: of each engine the addresses of its nodes; the first one serves HTTP.
        gpus_per_node: how many of each node's GPUs an engine has.
        pp: ``--pp``.
        tp: ``--tp``.
        layers: ``--layers``, as ids.
        stream: the stream kind, by which the variable of Kimi-K3's mixture is set.
        max_len: ``--max-len``.
        max_num_seqs: vLLM's ``--max-num-seqs``, of each engine.
        options: ``--stagetap-options``.
        expert_parallel: vLLM's ``--enable-expert-parallel``: whole experts on a rank.
        extra_args: further arguments of ``vllm serve`` that change none of what it captures.
    """

    nodes: list[list[str]]
    gpus_per_node: Count
    pp: Count
    tp: Count
    layers: str
    stream: str
    max_len: Count
    max_num_seqs: Count
    options: dict[str, Any] = {}
    expert_parallel: bool = False
    extra_args: list[str] = []


class Store(_Section, frozen=True, kw_only=True):
    """A mooncake_master on the trainer's first node, and memory that all of the trainer's lend.

    Attributes:
        run: the run in the store's address.
        segment_bytes: what each of the trainer's nodes lends.
        lease: ``--lease-ms`` of ``stagetap store up``, as a time.
        options: what else stands in the address.
    """

    run: str
    segment_bytes: Large
    lease: str
    options: dict[str, str | bool | int | float] = {}


class Trainer(_Section, frozen=True, kw_only=True):
    """``torchrun ... stagetap train``, once a node.

    Attributes:
        nodes: addresses; on the first one are the master and rank 0.
        gpus_per_node: ranks of each.
        rows: ``--data-path``.
        prompts: where ``stagetap train-prompts`` writes what to capture, in the trainer's order.
        save_path: ``--save-path``.
        fetch_wait: ``--stagetap-wait-s``, as a time.
        min_loss_tokens: ``--stagetap-min-loss-tokens``.
        total_seq_len: ``--total-seq-len``.
        seed: ``--seed``, which the order of rows hangs on.
        train_data_ratio: ``--train-data-ratio``, likewise.
        extra_args: further arguments of ``stagetap train``.
    """

    nodes: list[str]
    gpus_per_node: Count
    rows: str
    prompts: str
    save_path: str
    fetch_wait: str
    min_loss_tokens: Count
    total_seq_len: Count
    seed: Seed = 42
    train_data_ratio: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.9
    extra_args: list[str] = []


class Expected(_Section, frozen=True, kw_only=True):
    """What no command enforces, and the numbers of the others rest on.

    Attributes:
        tokens_in_flight: in the engines, or committed and not yet read, at the worst.
        consume_time: from a sample's commit to its removal, at the worst.
    """

    tokens_in_flight: Large
    consume_time: str


class Recipe(_Section, frozen=True, kw_only=True):
    """A whole recipe.

    Attributes:
        stagetap_recipe: version of this form.
        gpus: of all nodes together.
        nodes: how many nodes.
        target: the target's checkpoint, at the same path on every node.
        draft: the draft's config.json, on the trainer's nodes.
    """

    stagetap_recipe: Literal[1]
    gpus: Count
    nodes: Count
    target: str
    draft: str
    engines: Engines
    store: Store
    trainer: Trainer
    expected: Expected

    @property
    def engine_nodes(self) -> list[str]:
        """Nodes of all engines."""
        return [node for nodes in self.engines.nodes for node in nodes]


def is_recipe(document: Any) -> bool:
    """Whether a document says that it is one."""
    return isinstance(document, Mapping) and MARKER in document


def read_recipe(document: Any, where: str) -> Recipe:
    """The recipe in a document.

    Raises:
        Refused: values are still open, all of them named; a key is unknown or missing, or a value
            of the wrong type.
    """
    if left := list(_left_open(document, "")):
        raise Refused(
            f"{where} leaves {', '.join(left)} open ({OPEN}): fill in what they are on your nodes"
        )
    try:
        recipe = msgspec.convert(document, Recipe, strict=True)
    except msgspec.ValidationError as error:
        raise Refused(f"{where}: {error}; configs/recipes has a whole one") from None
    for name, nodes in (
        ("engines.nodes", recipe.engines.nodes),
        ("trainer.nodes", [recipe.trainer.nodes]),
    ):
        if not nodes or not all(nodes):
            raise Refused(f"{where}: {name} is empty; name the address of each node")
        for node in (node for some in nodes for node in some):
            check_node(f"{where}: {name}", node)
    _check_texts(recipe, where)
    return recipe


def _check_texts(recipe: Recipe, where: str) -> None:
    """No value may be taken for nothing, or for an option of the command that it stands in."""
    for name, text in (
        ("target", recipe.target),
        ("draft", recipe.draft),
        ("engines.layers", recipe.engines.layers),
        ("store.run", recipe.store.run),
        ("trainer.rows", recipe.trainer.rows),
        ("trainer.prompts", recipe.trainer.prompts),
        ("trainer.save-path", recipe.trainer.save_path),
    ):
        if not text.strip() or text.startswith("-") or not text.isprintable():
            raise Refused(
                f"{where}: {name} is {shown(text)}; give a text that does not begin with -"
            )


def seconds(where: str, text: str) -> float:
    """A time of the recipe. Raises Refused, naming the key."""
    try:
        return parse_seconds(text)
    except ValueError as error:
        raise Refused(f"{where}: {error}") from None


def _left_open(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, str) and OPEN in value:
        yield place
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _left_open(each, f"{place}.{key}" if place else str(key))
    elif isinstance(value, list):
        for position, each in enumerate(value):
            yield from _left_open(each, f"{place}[{position}]")
