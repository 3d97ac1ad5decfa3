"""Whether the checkpoint that a training goes on with is of the draft that it is to train."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stagetap.errors import Refused
from stagetap.training.reads import DraftReads, draft_config, saved_taps
from stagetap.wording import one_line, shortened

SHAPE = (
    "block_size",
    "mask_token_id",
    "draft_vocab_size",
    "sample_from_anchor",
    "sliding_window_non_causal",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
"""Fields of speculators' configurations that a flag of the same name settles. Of another value, a
checkpoint's weights load in part or mean something else, and the trainer goes on with them."""

LAYERS = ("num_layers", "full_attention_indices", "sliding_window")
"""Flags that settle the layers of a draft for which no file was given."""


def check_resumed(args: argparse.Namespace, reads: DraftReads) -> None:
    """Refuse to go on with the checkpoint of another draft than these arguments describe.

    Raises:
        Refused: it reads other taps, or the same in another order, or it is of another shape.
    """
    if args.no_resume_from_checkpoint or (checkpoint := _resumed(args.save_path)) is None:
        return
    try:
        saved = _shape(draft_config(args.speculator_type, checkpoint))
    except (OSError, ValueError) as error:
        raise Refused(
            f"{checkpoint} cannot be gone on with ({shortened(one_line(error), 200)}): remove it, "
            "or give another --save-path"
        ) from error
    for name, asked in (_described(args) | {"taps": list(reads.taps)}).items():
        found = saved.get(name)
        if None not in (asked, found) and asked != found:
            raise Refused(
                f"{checkpoint}, which training would go on with, is of a draft with {name} "
                f"{found}, this one has {asked}: give the same draft, or another --save-path"
            )


def _resumed(save_path: str) -> Path | None:
    """The checkpoint that speculators' trainer goes on with, if there is one."""
    from speculators.train.checkpointer import BaseCheckpointer

    checkpoint = BaseCheckpointer(save_path).prev_path
    return checkpoint if checkpoint is not None and (checkpoint / "config.json").is_file() else None


def _described(args: argparse.Namespace) -> dict[str, Any]:
    """The shape of the draft that these arguments describe, None where they leave it open."""
    from stagetap.drafts.k3_dspark import K3DSparkConfig

    if args.from_pretrained:
        return _shape(draft_config(args.speculator_type, args.from_pretrained))
    if args.speculator_type == K3DSparkConfig.model_type:
        return _shape(draft_config(args.speculator_type, args.draft_config))
    if args.speculator_type == "mtp":
        return {}  # its target's own
    flags = vars(args)
    return {name: flags.get(name) for name in (SHAPE if args.draft_config else SHAPE + LAYERS)}


def _shape(config: Any) -> dict[str, Any]:
    """The shape of the draft of one of speculators' configurations, as its flags would say it."""
    layers = config.transformer_layer_config
    # A K3 draft is one flat configuration, of which speculators' own holds a part.
    shape = {name: getattr(config, name, getattr(layers, name, None)) for name in SHAPE}
    shape |= {"taps": saved_taps(config), "num_layers": layers.num_hidden_layers}
    if kinds := getattr(layers, "layer_types", None):
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
        shape["full_attention_indices"] = full
        if len(full) < len(kinds):
            shape["sliding_window"] = layers.sliding_window
    return shape
