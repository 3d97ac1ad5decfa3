"""What a draft reads of its target, and whether a dataset holds it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagetap.errors import Refused
from stagetap.fingerprint import weights_fingerprint
from stagetap.stores.base import Invariant
from stagetap.taps import ID_CONVENTION, STREAM_PREFIX_SUM, STREAM_RESIDUAL


@dataclass(frozen=True)
class DraftReads:
    """What a draft reads of its target.

    Attributes:
        taps: tap ids, in the order in which the draft takes them side by side; none for a draft
            that reads the last one alone.
        stream: the stream kind that they must be of.
        hidden_size: width of the target's stream.
        num_hidden_layers: N of the target; the training targets come from tap N, un-normed.
    """

    taps: tuple[int, ...]
    stream: str
    hidden_size: int
    num_hidden_layers: int

    @property
    def columns(self) -> tuple[int, ...]:
        """The taps and, behind them, the last one: the layout of speculators."""
        return (*self.taps, self.num_hidden_layers)


def draft_reads(args: argparse.Namespace) -> DraftReads:
    """What the draft reads that these arguments of ``speculators train`` describe."""
    from speculators.models.utils import get_verifier_config

    target = get_verifier_config(
        args.verifier_name_or_path, trust_remote_code=args.trust_remote_code
    )
    taps, stream = _taps_and_stream(args)
    return DraftReads(
        taps=tuple(taps),
        stream=args.stagetap_stream or stream,
        hidden_size=target.hidden_size,
        num_hidden_layers=target.num_hidden_layers,
    )


def draft_config(speculator_type: str, name_or_path: str | Path) -> Any:
    """speculators' configuration of a saved draft. Raises what reading one raises."""
    from speculators import SpeculatorModel

    return SpeculatorModel.registry[speculator_type].config_class.from_pretrained(name_or_path)


def saved_taps(config: Any) -> list[int] | None:
    """The taps that a draft of this configuration reads, in its order, if it says them."""
    return getattr(config, "aux_hidden_state_layer_ids", None) or getattr(
        config, "eagle_aux_hidden_state_layer_ids", None
    )


def _taps_and_stream(args: argparse.Namespace) -> tuple[list[int], str]:
    from speculators.models.utils import resolve_target_layer_ids

    from stagetap.drafts.k3_dspark import K3DSparkConfig

    if args.speculator_type == "mtp":
        return [], STREAM_RESIDUAL
    if args.speculator_type == K3DSparkConfig.model_type:
        config = K3DSparkConfig.from_pretrained(args.from_pretrained or args.draft_config)
        return config.tap_ids, config.stream
    taps = args.target_layer_ids
    if args.from_pretrained:
        taps = saved_taps(draft_config(args.speculator_type, args.from_pretrained))
    return (
        resolve_target_layer_ids(
            taps, args.verifier_name_or_path, trust_remote_code=args.trust_remote_code
        ),
        STREAM_RESIDUAL,
    )


def check_dataset(uri: str, stored: Invariant, reads: DraftReads) -> None:
    """Refuse a dataset on which this draft would train on something else than it will be served.

    Raises:
        Refused: another stream kind, or one whose last tap gives no targets; another target; taps
            that were not captured.
    """
    if stored.stream != reads.stream:
        raise Refused(
            f"{uri} holds the stream {stored.stream!r}, this draft reads {reads.stream!r}: capture "
            f"that one, or say --stagetap-stream {stored.stream} if the draft will be served on it"
        )
    if stored.stream == STREAM_PREFIX_SUM:
        raise Refused(
            f"{uri} holds the stream {stored.stream!r}, whose last tap is not what the target's "
            "head reads, so it gives no training targets: capture attn_res_mixture, for a draft "
            "with fc_norm"
        )
    if stored.id_convention != ID_CONVENTION:
        raise Refused(
            f"{uri} counts layers as {stored.id_convention!r}, drafts count them as "
            f"{ID_CONVENTION!r}: capture with this StageTap"
        )
    for name, ours, theirs in (
        ("hidden size", stored.hidden_size, reads.hidden_size),
        ("number of layers", stored.num_hidden_layers, reads.num_hidden_layers),
    ):
        if ours != theirs:
            raise Refused(
                f"{uri}: its {name} is {ours}, the draft's target has {theirs}: give the target "
                "that was captured as --verifier-name-or-path, or capture this one"
            )
    missing = [str(tap) for tap in reads.columns if tap not in stored.layer_ids]
    if missing:
        wanted = ",".join(map(str, dict.fromkeys(reads.columns)))
        raise Refused(
            f"{uri} holds the layers {list(stored.layer_ids)}, this draft also reads "
            f"{', '.join(missing)} ({reads.num_hidden_layers} is the last one, for the targets): "
            f"capture with --layers {wanted}, or train on other layers with --target-layer-ids"
        )


def check_target(uri: str, stored: Invariant, verifier: str) -> None:
    """Refuse a target folder other than the one that was captured.

    A Hugging Face name is not looked at: which of its revisions was captured is not known here.

    Raises:
        Refused: its fingerprint differs.
    """
    folder = Path(verifier)
    if folder.is_dir() and (found := weights_fingerprint(folder)) != stored.weights_fingerprint:
        raise Refused(
            f"{uri} was captured from a checkpoint of fingerprint {stored.weights_fingerprint}, "
            f"{verifier} has {found}: give the one that was captured as --verifier-name-or-path, "
            "or say --stagetap-target any if its head and embedding are the same"
        )
