"""Whether the weights that a training begins with are of the draft that it is to train."""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from stagetap.errors import Refused
from stagetap.fingerprint import weights_fingerprint
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

K3_SHAPE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank"),
    *("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rms_norm_eps"),
    *("rope_parameters", "enable_confidence_head"),
)
"""What a K3 draft's own file settles beside these."""

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer_state_dict.pt"
"""Files of a checkpoint, as speculators names them."""

LAYERS = ("num_layers", "full_attention_indices", "sliding_window")
"""Flags that settle the layers of a draft for which no file was given."""


def check_started_from(args: argparse.Namespace) -> None:
    """Refuse a draft in ``--from-pretrained`` that belongs to another target, or other tokens.

    speculators takes embedding, head and final norm from the target that the draft's own
    config.json names, and ``--verifier-name-or-path`` only where it names none.

    Raises:
        Refused: it names another target, or its vocabulary is not the one of these rows.
    """
    if not args.from_pretrained or args.speculator_type == "mtp":
        return
    draft = Path(args.from_pretrained)
    named = _named_target(draft_config(args.speculator_type, args.from_pretrained))
    if named is not None and not _one_folder(named, args.verifier_name_or_path):
        raise Refused(
            f"--from-pretrained {draft} names the target {named} in its config.json, whose "
            f"embedding and head would be taken, not those of {args.verifier_name_or_path}: write "
            "null or the target's folder there (speculators_config.verifier.name_or_path)"
        )
    _check_vocabulary(args, draft)


def check_resumed(args: argparse.Namespace, reads: DraftReads) -> str | None:
    """Refuse to go on with the checkpoint of another draft than these arguments describe.

    Returns:
        What there is to say of a training that is done already.

    Raises:
        Refused: it is not whole, it reads other taps, or the same in another order, or it is of
            another shape, target or vocabulary.
    """
    if args.no_resume_from_checkpoint or (checkpoint := _resumed(args.save_path)) is None:
        return None
    _check_whole(checkpoint)
    try:
        config = draft_config(args.speculator_type, checkpoint)
        saved = _shape(config)
    except (OSError, ValueError) as error:
        raise Refused(
            f"{checkpoint} cannot be gone on with ({shortened(one_line(error), 200)}): remove it, "
            "or give another --save-path"
        ) from error
    named = _named_target(config)
    if named is not None and not _one_target(named, args.verifier_name_or_path):
        raise Refused(
            f"{checkpoint}, which training would go on with, is of a draft of the target {named}, "
            f"this one is of {args.verifier_name_or_path}: give the same target, or another "
            "--save-path; a target that was moved is corrected in its config.json"
        )
    for name, asked in (_described(args) | {"taps": list(reads.taps)}).items():
        found = saved.get(name)
        if None not in (asked, found) and asked != found:
            raise Refused(
                f"{checkpoint}, which training would go on with, is of a draft with {name} "
                f"{found}, this one has {asked}: give the same draft, or another --save-path"
            )
    _check_vocabulary(args, checkpoint)
    if (done := int(checkpoint.name) + 1) < args.epochs:
        return None
    return (
        f"{checkpoint} is of epoch {done} of {args.epochs}: nothing was left to train; give more "
        "--epochs to go on"
    )


def _resumed(save_path: str) -> Path | None:
    """The checkpoint that speculators' trainer goes on with, if there is one."""
    from speculators.train.checkpointer import BaseCheckpointer

    return BaseCheckpointer(save_path).prev_path


def _check_whole(checkpoint: Path) -> None:
    """Refuse what a training left that ended while it wrote: the trainer would end in torch."""
    problem = None
    for file in (checkpoint / name for name in ("config.json", WEIGHTS, OPTIMIZER)):
        if not file.is_file():
            problem = f"{file.name} is missing"
    try:
        for weights in checkpoint.glob("*.safetensors"):
            with safe_open(weights, "np"):
                pass
        for archive in checkpoint.glob("*.pt"):
            zipfile.ZipFile(archive).close()
    except (OSError, SafetensorError, zipfile.BadZipFile) as error:
        problem = f"{shortened(one_line(error), 200)}"
    if problem is not None:
        raise Refused(
            f"{checkpoint}, which training would go on with, is not whole ({problem}): remove that "
            "folder, and training goes on with the checkpoint before it"
        )


def _named_target(config: Any) -> str | None:
    """The target that a draft's configuration names, if it names one."""
    of_speculators = getattr(config, "speculators_config", None)
    name = of_speculators.verifier.name_or_path if of_speculators else None
    return str(name) if name else None


def _one_folder(named: str, given: str) -> bool:
    return named == given or (
        Path(named).is_dir() and Path(named).resolve() == Path(given).resolve()
    )


def _one_target(named: str, given: str) -> bool:
    if _one_folder(named, given):
        return True
    folders = Path(named), Path(given)
    if not all(folder.is_dir() for folder in folders):
        return False
    ours, theirs = map(weights_fingerprint, folders)
    return ours == theirs


def _check_vocabulary(args: argparse.Namespace, draft: Path) -> None:
    """Refuse a draft whose head is of other tokens than these rows' map of its vocabulary says.

    Raises:
        Refused: ids of the draft's vocabulary mean other tokens in one and in the other.
    """
    weights, size = draft / WEIGHTS, args.draft_vocab_size
    if size is None or not weights.is_file():
        return
    cached = Path(args.data_path) / f"d2t-{size}.npy"  # as speculators names it
    file = Path(args.d2t_path or cached)
    with safe_open(weights, "np") as tensors:
        saved = tensors.get_tensor("d2t") if "d2t" in tensors.keys() else None  # noqa: SIM118
    if saved is None or not file.is_file():
        return
    asked = np.load(file)
    if not np.array_equal(saved, asked):
        many = int((saved != asked).sum()) if saved.shape == asked.shape else len(saved)
        raise Refused(
            f"{many} of {len(saved)} ids of the vocabulary of {draft} are other tokens by {file}, "
            "the map of these rows: give the map it was trained with, --d2t-path and --t2d-path, "
            "or train a new draft"
        )


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
    from stagetap.drafts.k3_dspark import K3DSparkConfig

    layers = config.transformer_layer_config
    # A K3 draft is one flat configuration, of which speculators' own holds a part.
    names = (*SHAPE, *K3_SHAPE) if isinstance(layers, K3DSparkConfig) else SHAPE
    shape = {name: getattr(config, name, getattr(layers, name, None)) for name in names}
    shape |= {"taps": saved_taps(config), "num_layers": layers.num_hidden_layers}
    if kinds := getattr(layers, "layer_types", None):
        full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
        shape["full_attention_indices"] = full
        if len(full) < len(kinds):
            shape["sliding_window"] = layers.sliding_window
    return shape
