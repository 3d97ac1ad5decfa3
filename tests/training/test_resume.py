"""A training goes on with a checkpoint of its own draft alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

from drafts.tiny_k3 import draft, write_target
from stagetap import Refused
from stagetap.training.reads import DraftReads, draft_reads
from stagetap.training.resume import check_resumed
from training.test_backend import READS, arguments

DSPARK = {
    "num_layers": 2,
    "full_attention_indices": [0],
    "sliding_window": 64,
    "block_size": 3,
    "markov_rank": 4,
    "mask_token_id": 511,
    "draft_vocab_size": 512,
    "sample_from_anchor": None,
}


def common(target: Path) -> dict[str, Any]:
    return {
        "draft_vocab_size": 512,
        "transformer_layer_config": Qwen3Config(
            num_hidden_layers=2,
            use_sliding_window=True,
            sliding_window=64,
            layer_types=["full_attention", "sliding_attention"],
        ),
        "speculators_config": SpeculatorsConfig(
            algorithm="any",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    }


@pytest.fixture
def save_path(target: Path, tmp_path: Path) -> Path:
    """Where a DSpark draft of the taps 4 and 2 was trained for two epochs."""
    config = DSparkSpeculatorConfig(
        aux_hidden_state_layer_ids=[4, 2],
        block_size=3,
        markov_rank=4,
        mask_token_id=511,
        **common(target),
    )
    for epoch in (0, 1):
        config.save_pretrained(tmp_path / "draft" / str(epoch))
    return tmp_path / "draft"


def test_the_same_draft_goes_on(target: Path, save_path: Path, tmp_path: Path) -> None:
    check_resumed(arguments(target, save_path=str(save_path), **DSPARK), READS)
    check_resumed(arguments(target, save_path=str(tmp_path / "fresh"), **DSPARK), READS)
    again = {"from_pretrained": str(save_path / "1"), "save_path": str(save_path)}
    check_resumed(arguments(target, **again), READS)


@pytest.mark.parametrize(
    ("taps", "changes", "says"),
    [
        ((2, 4), {}, r"taps \[4, 2\], this one has \[2, 4\]"),
        ((4,), {}, r"taps \[4, 2\], this one has \[4\]"),
        ((4, 2), {"block_size": 4}, "block_size 3, this one has 4"),
        ((4, 2), {"markov_rank": 0}, "markov_rank 4, this one has 0"),
        ((4, 2), {"mask_token_id": 0}, "mask_token_id 511, this one has 0"),
        ((4, 2), {"sample_from_anchor": False}, "sample_from_anchor True, this one has False"),
        ((4, 2), {"num_layers": 1}, "num_layers 2, this one has 1"),
        ((4, 2), {"full_attention_indices": []}, r"full_attention_indices \[0\], this one has \[]"),
        ((4, 2), {"sliding_window": 32}, "sliding_window 64, this one has 32"),
    ],
)
def test_another_draft_does_not(
    target: Path, save_path: Path, taps: tuple[int, ...], changes: dict[str, Any], says: str
) -> None:
    args = arguments(target, save_path=str(save_path), **(DSPARK | changes))
    reads = DraftReads(taps=taps, stream="residual", hidden_size=16, num_hidden_layers=6)
    with pytest.raises(Refused, match=rf"draft/1, which .* {says}: give the same .*--save-path"):
        check_resumed(args, reads)
    args.no_resume_from_checkpoint = True
    check_resumed(args, reads)


def test_another_saved_draft_does_not(target: Path, save_path: Path, tmp_path: Path) -> None:
    DSparkSpeculatorConfig(
        aux_hidden_state_layer_ids=[4, 2], block_size=7, **common(target)
    ).save_pretrained(tmp_path / "other")
    args = arguments(target, save_path=str(save_path), from_pretrained=str(tmp_path / "other"))
    with pytest.raises(Refused, match="block_size 3, this one has 7"):
        check_resumed(args, READS)


def test_eagle3(target: Path, tmp_path: Path) -> None:
    Eagle3SpeculatorConfig(
        eagle_aux_hidden_state_layer_ids=[4, 2], norm_before_residual=True, **common(target)
    ).save_pretrained(tmp_path / "draft/0")
    args = arguments(
        target,
        speculator_type="eagle3",
        save_path=str(tmp_path / "draft"),
        norm_before_residual=True,
        num_layers=2,
        full_attention_indices=[0],
    )
    check_resumed(args, READS)
    args.norm_before_residual = False
    with pytest.raises(Refused, match="norm_before_residual True, this one has False"):
        check_resumed(args, READS)


def test_a_k3_draft(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    draft(fc_norm=True).save_pretrained(tmp_path / "draft/0")
    for fc_norm in (True, False):
        draft(fc_norm=fc_norm).config.save_pretrained(tmp_path / f"file-{fc_norm}")
        args = arguments(
            target,
            speculator_type="k3_dspark",
            target_layer_ids=None,
            draft_config=str(tmp_path / f"file-{fc_norm}" / "config.json"),
            save_path=str(tmp_path / "draft"),
        )
        if fc_norm:
            check_resumed(args, draft_reads(args))
        else:
            with pytest.raises(Refused, match="of a draft with fc_norm True, this one has False"):
                check_resumed(args, draft_reads(args))


def test_a_checkpoint_that_cannot_be_read(target: Path, save_path: Path) -> None:
    (save_path / "1/config.json").write_text("{")
    with pytest.raises(Refused, match=r"draft/1 cannot be gone on with \(.+\): remove it, or give"):
        check_resumed(arguments(target, save_path=str(save_path), **DSPARK), READS)
