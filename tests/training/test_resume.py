"""A training goes on with a checkpoint of its own draft alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import Qwen3Config

from drafts.tiny_k3 import draft, write_target
from stagetap import Refused
from stagetap.training.reads import DraftReads, draft_reads
from stagetap.training.resume import check_resumed, check_started_from
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


def save(config: Any, folder: Path, d2t: list[int] | None = None) -> None:
    """A checkpoint as the trainer leaves it, as far as it is looked at."""
    config.save_pretrained(folder)
    tensors = {"d2t": np.array(d2t)} if d2t else {"weight": np.zeros(4, np.float32)}
    save_file(tensors, folder / "model.safetensors")
    torch.save({}, folder / "optimizer_state_dict.pt")


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
        save(config, tmp_path / "draft" / str(epoch))
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
    config = Eagle3SpeculatorConfig(
        eagle_aux_hidden_state_layer_ids=[4, 2], norm_before_residual=True, **common(target)
    )
    save(config, tmp_path / "draft/0")
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
    save(draft(fc_norm=True), tmp_path / "draft/0")
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


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer_state_dict.pt", "config.json"])
def test_a_checkpoint_that_is_not_whole_is_named(target: Path, save_path: Path, name: str) -> None:
    """A full disk leaves one that is cut short, kill -9 one without its last files."""
    args = arguments(target, save_path=str(save_path), **DSPARK)
    says = r"draft/1, .* is not whole \(.+\): remove that folder, and training goes on with"
    file = save_path / "1" / name
    if name != "config.json":
        file.write_bytes(file.read_bytes()[:-40])
        with pytest.raises(Refused, match=says):
            check_resumed(args, READS)
    file.unlink()
    with pytest.raises(Refused, match=says):
        check_resumed(args, READS)
    shutil.rmtree(save_path / "1")
    check_resumed(args, READS)


def test_a_training_that_is_done_says_so(target: Path, save_path: Path) -> None:
    args = arguments(target, save_path=str(save_path), **DSPARK)
    for epochs, says in ((2, "draft/1 is of epoch 2 of 2: nothing was left to train"), (3, None)):
        args.epochs = epochs
        done = check_resumed(args, READS)
        assert (done is None) == (says is None)
        assert says is None or says in str(done)


def another_target(target: Path, folder: Path) -> Path:
    """Of another configuration."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 12345.0}))
    return folder


def test_a_checkpoint_of_another_target_is_refused(
    target: Path, save_path: Path, tmp_path: Path
) -> None:
    other = another_target(target, tmp_path / "other")
    says = rf"draft/1, .* of the target {target}, this one is of {other}: give the same target"
    with pytest.raises(Refused, match=says):
        check_resumed(arguments(other, save_path=str(save_path), **DSPARK), READS)
    moved = shutil.copytree(target, tmp_path / "moved")
    check_resumed(arguments(moved, save_path=str(save_path), **DSPARK), READS)


def test_a_draft_that_names_another_target_is_refused(
    target: Path, save_path: Path, tmp_path: Path
) -> None:
    """speculators would take embedding, head and norm from that one."""
    other = another_target(target, tmp_path / "other")
    args = arguments(target, from_pretrained=str(save_path / "1"))
    check_started_from(args)
    args.verifier_name_or_path = str(other)
    with pytest.raises(Refused, match=rf"names the target {target} .* not those of {other}: write"):
        check_started_from(args)
    file = save_path / "1/config.json"
    config = json.loads(file.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = None
    file.write_text(json.dumps(config))
    check_started_from(args)


def test_ids_of_a_draft_that_are_other_tokens_are_refused(
    target: Path, save_path: Path, tmp_path: Path
) -> None:
    """speculators would train towards the tokens of these rows, and serve those of the draft."""
    config = DSparkSpeculatorConfig(
        aux_hidden_state_layer_ids=[4, 2],
        block_size=3,
        markov_rank=4,
        mask_token_id=511,
        **(common(target) | {"draft_vocab_size": 4}),
    )
    save(config, save_path / "1", d2t=[0, 0, 5, 9])
    rows = tmp_path / "rows"
    rows.mkdir()
    given = DSPARK | {"draft_vocab_size": 4, "data_path": str(rows)}
    resumed = arguments(target, save_path=str(save_path), **given)
    started = arguments(target, from_pretrained=str(save_path / "1"), **given)
    for d2t in ([0, 0, 5, 9], [0, 1, 5, 8]):
        np.save(rows / "d2t-4.npy", np.array(d2t))
        if d2t[1] == 0:
            check_resumed(resumed, READS)
            check_started_from(started)
            continue
        for check in (lambda: check_resumed(resumed, READS), lambda: check_started_from(started)):
            with pytest.raises(Refused, match=r"2 of 4 ids of .*draft/1 are other tokens by .*d2t"):
                check()
    np.save(tmp_path / "its-own.npy", np.array([0, 0, 5, 9]))
    resumed.d2t_path = str(tmp_path / "its-own.npy")
    check_resumed(resumed, READS)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("rope_parameters", {"rope_parameters": {"rope_type": "default", "rope_theta": 1234.0}}),
        ("rms_norm_eps", {"rms_norm_eps": 0.5}),
        ("intermediate_size", {"intermediate_size": 56}),
        ("num_attention_heads", {"num_attention_heads": 8}),
    ],
)
def test_a_k3_draft_of_other_values(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    target = write_target(tmp_path / "target")
    save(draft(), tmp_path / "draft/0")
    draft(**changes).config.save_pretrained(tmp_path / "file")
    args = arguments(
        target,
        speculator_type="k3_dspark",
        target_layer_ids=None,
        draft_config=str(tmp_path / "file/config.json"),
        save_path=str(tmp_path / "draft"),
    )
    with pytest.raises(Refused, match=f"draft/0, which .* of a draft with {name} "):
        check_resumed(args, draft_reads(args))
