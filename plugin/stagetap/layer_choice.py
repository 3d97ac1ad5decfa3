"""What may be written as ``--stagetap-layers``: ids, ``last``, a drafter's spread, a draft's file.

A choice is resolved once, where the target's number of decoder layers N is known; what comes after
sees ids alone, in StageTap's convention (:mod:`stagetap.taps`): id k is the residual stream after
decoder layer k - 1, 0 the embedding output, N the last one, un-normed.

=====================  ===========================================================================
``2,15,last``          ids between commas; ``last`` is N
``eagle3``             2, N // 2, N - 3, and N
``dflash:K``           K layers as DFlash spreads them, and N
``dspark:K``           the same: DSpark's released configurations keep DFlash's spread
``DIR/config.json``    what a draft model reads of its target; ``DIR/config.json,last`` adds N
=====================  ===========================================================================

Sources. EAGLE-3: ``get_eagle3_default_aux_hidden_state_layers`` of vLLM 0.32.0. DFlash:
``build_target_layer_ids`` of z-lab/dflash (``model/utils.py``), which SpecForge, speculators,
SGLang and ModelOpt repeat: K layers evenly from 1 to N - 3, counted from 0 and tapped behind the
layer, so that id = layer + 1; one layer is N // 2. It gives the released [1, 9, 17, 25, 33] of a
target with 36 layers, [1, 10, 19, 28, 37] with 40 and [1, 13, 25, 37, 49] with 52. DSpark:
``config/dspark`` of deepseek-ai/DeepSpec has [1, 9, 17, 25, 33] for 36 layers as well. Released
drafts that spread otherwise (Gemma 4 12B: [5, 17, 29, 41, 46]; Kimi-K3: [2, 23, 47, 71, 89]) are
named by their configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagetap.config_file import config_file, read_config_file
from stagetap.config_values import ConfigValues
from stagetap.errors import Refused
from stagetap.taps import parse_layer_ids, validate_layer_ids
from stagetap.wording import shortened, shown

LAST = "last"
HELP = (
    "Layers to capture: ids between commas such as 2,15,27,30 (0 is the embedding output, k the "
    "residual stream after layer k-1, N the last one before the final norm), last for N, eagle3, "
    "dflash:K, dspark:K, or the path of a draft model's config.json."
)

_SPREAD = re.compile(r"(dflash|dspark):(.*)", re.DOTALL)
_CHOICES = (
    "write ids between commas such as 2,15,27, last, eagle3, dflash:K, dspark:K, or the path of a "
    "draft's config.json (a folder as ./draft)"
)


@dataclass(frozen=True)
class DraftKey:
    """Where a draft's configuration says which target layers it reads.

    Attributes:
        path: names of the key and of what it stands in.
        offset: what to add to get StageTap's id.
        evidence: where that offset comes from; all of vLLM 0.32.0.
    """

    path: tuple[str, ...]
    offset: int
    evidence: str

    @property
    def name(self) -> str:
        """``dflash_config.target_layer_ids``."""
        return ".".join(self.path)


_EAGLE3_UTILS = "`v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`"

DRAFT_KEYS = (
    DraftKey(
        ("eagle_aux_hidden_state_layer_ids",),
        0,
        f"{_EAGLE3_UTILS} hands the ids to the target as they are; its "
        "`EagleModelMixin._maybe_add_hidden_state` counts 0 for the embedding output",
    ),
    DraftKey(
        ("eagle_config", "eagle_aux_hidden_state_layer_ids"),
        0,
        "`v1/worker/gpu_model_runner.py`, as above",
    ),
    DraftKey(
        ("aux_hidden_state_layer_ids",),
        0,
        "speculators' own key; `transformers_utils/configs/speculators/algos.py` copies it to "
        "`eagle_aux_hidden_state_layer_ids`",
    ),
    DraftKey(
        ("dflash_config", "target_layer_ids"),
        1,
        f'{_EAGLE3_UTILS}: "Add 1 to convert DFlash\'s aux layer id semantics"',
    ),
    DraftKey(("dflash_config", "layer_ids"), 0, f"{_EAGLE3_UTILS}, no conversion"),
    DraftKey(("eagle_config", "layer_ids"), 0, f"{_EAGLE3_UTILS}, no conversion"),
    DraftKey(
        ("dspark_target_layer_ids",),
        1,
        f"{_EAGLE3_UTILS}; 0 where `model_type` is `deepseek_v41`, whose ids name attention inputs",
    ),
    DraftKey(("target_layer_ids",), 1, f"{_EAGLE3_UTILS}, dense DSpark"),
)


def choose_layers(choice: Any, num_hidden_layers: int | None) -> tuple[int, ...]:
    """The layer ids that a choice means for a target, in the order asked.

    Args:
        choice: text as above, or a list of ids.
        num_hidden_layers: N; None where the target's configuration is not at hand, which is enough
            for plain ids alone.

    Raises:
        Refused: naming what is wrong: an unknown word, an id that is out of range or repeated, a
            target too shallow for the spread, a draft's configuration that cannot be read, names no
            layers, or contradicts itself or the target.
    """
    if not isinstance(choice, str):
        return validate_layer_ids(choice, num_hidden_layers)
    if not needs_model(choice):
        return validate_layer_ids(parse_layer_ids(choice), num_hidden_layers)
    check_choice(choice)
    if num_hidden_layers is None:
        raise Refused(
            f"layers: {shown(choice)} needs the model's number of layers, and no config.json on "
            "this machine says its num_hidden_layers; download the model, or write the ids"
        )
    return _resolve(choice.strip(), num_hidden_layers)


def needs_model(choice: str) -> bool:
    """Whether a choice means anything only for a target of known depth."""
    return re.fullmatch(r"[\s0-9,+_-]*", choice) is None


def check_choice(choice: str) -> None:
    """Refuse what no target makes right, before one is at hand.

    Raises:
        Refused: an unknown word, a spread without its number, or ids that contradict each other.
    """
    choice = choice.strip()
    if not needs_model(choice):
        parse_layer_ids(choice)
        return
    if _is_path(choice) or choice == "eagle3":
        return
    if spread := _SPREAD.fullmatch(choice):
        _count(*spread.groups())
        return
    words = [word.strip() for word in choice.split(",")]
    for word in words:
        if word == "eagle3" or _SPREAD.fullmatch(word):
            raise Refused(
                f"layers: {word} stands alone and has the last layer already; write the ids to "
                "choose others"
            )
        if word != LAST and needs_model(word):
            raise Refused(f"layers: {shown(word)} is no choice of layers; {_CHOICES}")
    if words.count(LAST) > 1:
        raise Refused("layers: last is asked for more than once; name each id once")
    if ids := ",".join(word for word in words if word != LAST):
        parse_layer_ids(ids)


def draft_layer_ids(config: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Which of its target's states a draft reads, as StageTap's ids, in the order of the key.

    Args:
        config: the draft's ``config.json``.
        where: what to call it in a message.

    Raises:
        Refused: no key of :data:`DRAFT_KEYS`, two that contradict each other, or ids that are none
            or repeated.
    """
    found: dict[str, tuple[int, ...]] = {}
    for key in DRAFT_KEYS:
        value = _lookup(config, key)
        if value is None:
            continue
        offset = key.offset
        if key.path == ("dspark_target_layer_ids",) and config.get("model_type") == "deepseek_v41":
            offset = 0
        found[key.name] = _shifted(value, offset, f"{where}: {key.name}")
    if not found:
        names = ", ".join(key.name for key in DRAFT_KEYS)
        raise Refused(f"layers: {where} names no target layers; known keys are {names}")
    (first, ids), *others = found.items()
    for name, other in others:
        if other != ids:
            raise Refused(
                f"layers: {where} contradicts itself: {first} means the ids {list(ids)}, {name} "
                f"means {list(other)}; write the ids that are right"
            )
    return _valid(ids, where, None)


def spread(num_hidden_layers: int, count: int) -> tuple[int, ...]:
    """DFlash's spread as StageTap's ids, without the last: ``count`` ids between 2 and N - 2."""
    if count == 1:
        return (num_hidden_layers // 2 + 1,)
    start, end = 1, num_hidden_layers - 3
    return tuple(round(start + i * (end - start) / (count - 1)) + 1 for i in range(count))


def _resolve(choice: str, num_hidden_layers: int) -> tuple[int, ...]:
    if _is_path(choice):
        return _from_draft(choice, num_hidden_layers)
    if choice == "eagle3":
        aux = (2, num_hidden_layers // 2, num_hidden_layers - 3)
        return _deep_enough(choice, aux, num_hidden_layers)
    if named := _SPREAD.fullmatch(choice):
        ids = spread(num_hidden_layers, _count(*named.groups()))
        return _deep_enough(choice, ids, num_hidden_layers)
    words = [word.strip() for word in choice.split(",")]
    text = ",".join(str(num_hidden_layers) if word == LAST else word for word in words)
    return validate_layer_ids(parse_layer_ids(text), num_hidden_layers)


def _deep_enough(choice: str, aux: tuple[int, ...], num_hidden_layers: int) -> tuple[int, ...]:
    ids = (*aux, num_hidden_layers)
    if list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise Refused(
            f"layers: {choice} would tap {shown(list(ids))} of {num_hidden_layers} layers, some "
            "twice, out of order or below 0: the model is too shallow for it; write the ids"
        )
    return ids


def _count(name: str, text: str) -> int:
    if re.fullmatch(r"0*[1-9][0-9]{4,}", text):
        raise Refused(
            f"layers: {name}:{shortened(text)}: K is too large, no target has so many layers; "
            f"write how many the draft reads, such as {name}:5"
        )
    if re.match(r"[1-9][0-9]{0,3},", text):
        raise Refused(
            f"layers: {name}:{shortened(text)}: {name}:K stands alone and has the last layer "
            "already; write the ids to choose others"
        )
    if not re.fullmatch(r"[1-9][0-9]{0,3}", text):
        raise Refused(
            f"layers: {name}:{shortened(text)} needs the number of layers that the draft reads, "
            f"such as {name}:5"
        )
    return int(text)


def _is_path(choice: str) -> bool:
    path = _without_last(choice)
    return "/" in path or path.endswith(".json") or path in (".", "..")


def _without_last(choice: str) -> str:
    head, comma, tail = choice.rpartition(",")
    return head.strip() if comma and tail.strip() == LAST else choice


def _from_draft(choice: str, num_hidden_layers: int) -> tuple[int, ...]:
    path = _without_last(choice)
    try:
        ids = read_draft(path, num_hidden_layers)
    except DraftUnreadable as error:
        head, comma, tail = path.rpartition(",")
        if comma and "/" not in tail:
            raise Refused(
                f"layers: {shortened(head)} is followed by {shown(tail.strip())}: behind a draft "
                "only `,last` may stand; write the ids to choose others"
            ) from None
        raise Refused(f"layers: {error}; {_CHOICES}") from None
    if path != choice:
        ids = (*ids, num_hidden_layers)
    return _valid(ids, path, num_hidden_layers)


class DraftUnreadable(Refused):
    """There is no configuration of a draft where one was named."""


def read_draft(path: str, num_hidden_layers: int | None) -> tuple[int, ...]:
    """Which of its target's states the draft at ``path`` reads, as :func:`draft_layer_ids`.

    Args:
        path: a ``config.json``, or a folder with one.
        num_hidden_layers: N of the target; None where its configuration is not at hand.

    Raises:
        DraftUnreadable: no file there, or none in JSON.
        Refused: it names no layers, contradicts itself, or was made for another depth.
    """
    try:
        config = read_config_file(config_file(path))
    except Refused as error:
        raise DraftUnreadable(str(error)) from None
    ids = draft_layer_ids(config, path)
    if num_hidden_layers is not None:
        _check_target(ConfigValues(config, path), ids, num_hidden_layers)
    return _valid(ids, path, num_hidden_layers)


def _valid(ids: Sequence[int], path: str, num_hidden_layers: int | None) -> tuple[int, ...]:
    """The ids of a draft. Raises Refused, naming its file, where the target has no such ids."""
    try:
        return validate_layer_ids(ids, num_hidden_layers)
    except Refused as error:
        said = str(error).removeprefix("layers: ")
        raise Refused(f"layers: {shortened(path, 200)} names ids that do not fit: {said}") from None


def _check_target(draft: ConfigValues, ids: Sequence[int], num_hidden_layers: int) -> None:
    """A draft that says how deep its target is must have been made for one as deep as this."""
    depth = draft.optional_size("target_num_hidden_layers")
    if depth is None:
        told = draft.optional_size("num_target_layers")
        depth = None if told == len(ids) else told  # some drafts count what they read by this name
    if depth is not None and depth != num_hidden_layers:
        raise Refused(
            f"layers: {draft.where} was made for a target of {depth} layers, this model has "
            f"{num_hidden_layers}; name the draft of this model, or write the ids"
        )


def _lookup(config: Mapping[str, Any], key: DraftKey) -> Any:
    value: Any = config
    for name in key.path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _shifted(value: Any, offset: int, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise Refused(
            f"layers: {where} is {shown(value)}, no list of layers; write the ids instead"
        )
    for layer in value:
        if isinstance(layer, bool) or not isinstance(layer, int) or layer + offset < 0:
            raise Refused(f"layers: {where} holds {shown(layer)}, which is no layer; write the ids")
    return tuple(layer + offset for layer in value)
