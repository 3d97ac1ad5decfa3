"""Whether a draft is one that is built, and one of the recipe's target. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagetap.config_values import ConfigValues
from stagetap.errors import Refused
from stagetap.findings import Finding

_SIZES = (
    *("intermediate_size", "num_attention_heads", "max_position_embeddings"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_SWITCHES = ("enable_confidence_head", "confidence_head_with_markov")
_NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "block_size", "markov_rank")


def mask_token(draft: Mapping[str, Any], where: str) -> int:
    """The token at the places that a draft fills. Raises Refused where it is none of its tokens."""
    values = ConfigValues(draft, where)
    token = values.integer("mask_token_id")
    if token is None:
        raise Refused(f"{where} says no mask_token_id; add the one that the draft is trained with")
    vocabulary = values.size("vocab_size")
    if not 0 <= token < vocabulary:
        raise Refused(
            f"{where}: mask_token_id is {token}, its vocab_size {vocabulary}; give a token of the "
            "vocabulary"
        )
    return token


def check_target(
    draft: Mapping[str, Any], where: str, hidden_size: int | None, vocab_size: int | None
) -> Iterator[Finding]:
    """Whether a draft reads states as wide as the target's, and shares its embedding and head.

    Args:
        draft: its ``config.json``.
        where: what to call it in a message.
        hidden_size: the target's; None where its configuration does not say it.
        vocab_size: likewise.

    Raises:
        Refused: a value is missing or of the wrong type.
    """
    values = ConfigValues(draft, where)
    for name in _NEEDED:
        values.size(name)
    for name in _SIZES:
        values.optional_size(name)
    for name in _SWITCHES:
        values.flag(name)
    values.text("dtype")
    token = mask_token(draft, where)
    widths = (("hidden_size", "target_hidden_size"), hidden_size)
    tokens = (("vocab_size", "draft_vocab_size"), vocab_size)
    wrong = False
    for names, target in (widths, tokens):
        for name in names:
            said = values.optional_size(name)
            if said is None or target in (None, said):
                continue
            wrong = True
            yield Finding(
                "draft and target",
                f"{where} says {name} {said}, the target {names[0]} {target}",
                f"set {name} to {target}, or name the target that this draft is for",
            )
    if not wrong:
        yield Finding("draft and target", f"widths and vocabulary agree, mask_token_id is {token}")
