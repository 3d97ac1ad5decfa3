"""Whether a model can be spread over so many stages and ranks at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagetap.config_values import MAX_LAYERS, decoder_values
from stagetap.errors import Refused
from stagetap.partition import engine_stages
from stagetap.plan.model import Model
from stagetap.plan.parallel import Parallel
from stagetap.plan.read_model import read_model
from stagetap.plan.stages import make_plan


def check_layout(
    config: Mapping[str, Any],
    where: str,
    parallel: Parallel,
    max_len: int | None,
    named: Mapping[str, str],
) -> None:
    """Of a model whose shapes the plan cannot tell, only its heads and layers are looked at.

    Args:
        config: the model's ``config.json``.
        where: what to call it in a message.
        max_len: of a sequence; None where it is the model's.
        named: options of ``stagetap plan`` -> what they are called where the values come from.

    Raises:
        Refused: a stage without a layer, a dimension that does not divide by the ranks, or
            sequences longer than the model's positions.
    """
    try:
        _check(config, where, parallel, max_len)
    except Refused as error:
        said = str(error)
        for option, name in named.items():
            said = said.replace(option, name)
        raise Refused(said) from None


def _check(config: Mapping[str, Any], where: str, parallel: Parallel, max_len: int | None) -> None:
    values = decoder_values(config, where)
    if not values.is_list("num_attention_heads"):
        heads = values.size_or_none("num_attention_heads")
        parallel.share("num_attention_heads", heads or parallel.tp)
    model = _model(config, where)
    total = model.num_hidden_layers if model else values.optional_size("num_hidden_layers")
    if total is None or total > MAX_LAYERS:
        return
    stages = engine_stages(total, parallel.pp)
    if model is not None:
        make_plan(
            model,
            [total],
            parallel,
            partition=[end - start for start, end in stages],
            sequence_tokens=max_len or 1,
        )


def _model(config: Mapping[str, Any], where: str) -> Model | None:
    try:
        return read_model(config, where)
    except Refused:  # of shapes that it cannot tell
        return None
