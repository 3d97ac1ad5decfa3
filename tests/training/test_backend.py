"""What the backend refuses, before the first step."""

from __future__ import annotations

import argparse
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from speculators import SpeculatorsConfig, VerifierConfig
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.recovery import SampleUnavailable
from transformers import LlamaConfig, Qwen3Config

from drafts.tiny_k3 import draft, draft_config, write_target
from stagetap import Refused, SampleNotFound, open_dataset
from stagetap.fingerprint import weights_fingerprint
from stagetap.stores.base import Invariant
from stagetap.taps import ID_CONVENTION
from stagetap.training.backend import StageTapBackend
from stagetap.training.reads import DraftReads, check_dataset, draft_reads
from stagetap.training.rows import write_rows
from stagetap.training.summary import taken_lines
from store_samples import Engine, states, tapped
from training.conftest import Export
from training.test_transfer import rows_of


def arguments(target: Path, **changes: Any) -> argparse.Namespace:
    """What speculators hands to a backend, as far as it matters."""
    given: dict[str, Any] = {
        "verifier_name_or_path": str(target),
        "trust_remote_code": False,
        "speculator_type": "dspark",
        "target_layer_ids": [4, 2],
        "from_pretrained": "",
        "draft_config": "",
        "draft_vocab_size": None,
        "d2t_path": None,
        "data_path": "rows",
        "on_missing": "generate",
        "stagetap_store": None,
        "stagetap_run": None,
        "stagetap_stream": None,
        "stagetap_verify": "checksums",
        "stagetap_wait_s": 0.0,
        "stagetap_target": "same",
        "stagetap_min_loss_tokens": 0,
        "stagetap_after_read": "keep",
        "stagetap_metrics": None,
        "epochs": 1,
        "total_seq_len": 64,
        "save_path": str(target / "none"),
        "no_resume_from_checkpoint": False,
    }
    return argparse.Namespace(**(given | changes))


def invariant(**changes: Any) -> Invariant:
    fields: dict[str, Any] = {
        "weights_fingerprint": "sha256:" + "ab" * 32,
        "layer_ids": (2, 0, 4, 6),
        "stream": "residual",
        "dtype": "bfloat16",
        "id_convention": "after-layer",
        "hidden_size": 16,
        "num_hidden_layers": 6,
    }
    return Invariant(**(fields | changes))


LEFT_OUT = "left out for having no sample"
READS = DraftReads(taps=(4, 2), stream="residual", hidden_size=16, num_hidden_layers=6)


def test_a_dataset_that_fits() -> None:
    check_dataset("dataset", invariant(), READS)
    assert READS.columns == (4, 2, 6)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"layer_ids": (2, 0, 6)},
            r"dataset holds the layers \[2, 0, 6\], this draft also reads 4",
        ),
        ({"layer_ids": (2, 4)}, r"also reads 6 \(6 is the last one.*--layers 4,2,6"),
        ({"hidden_size": 32}, r"dataset: its hidden size is 32, the draft's target has 16"),
        ({"num_hidden_layers": 8}, r"its number of layers is 8, the draft's target has 6"),
        ({"id_convention": "before-layer"}, r"dataset counts layers as 'before-layer', drafts"),
        ({"stream": "attn_res_mixture"}, r"holds the stream 'attn_res_mixture', .* 'residual'"),
    ],
)
def test_a_dataset_that_does_not_fit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        check_dataset("dataset", invariant(**changes), READS)


def test_prefix_sums_give_no_targets() -> None:
    reads = DraftReads(taps=(4, 2), stream="prefix_sum", hidden_size=16, num_hidden_layers=6)
    with pytest.raises(Refused, match=r"gives no training targets: capture attn_res_mix"):
        check_dataset("dataset", invariant(stream="prefix_sum"), reads)


def test_what_a_draft_reads(target: Path) -> None:
    assert draft_reads(arguments(target)) == READS
    mtp = draft_reads(arguments(target, speculator_type="mtp"))
    assert mtp.columns == (6,)


def test_a_draft_that_goes_on_says_itself_what_it_reads(target: Path, tmp_path: Path) -> None:
    common = {
        "draft_vocab_size": 512,
        "speculators_config": SpeculatorsConfig(
            algorithm="any",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(target)),
        ),
    }
    DSparkSpeculatorConfig(
        transformer_layer_config=Qwen3Config(), aux_hidden_state_layer_ids=[1, 0], **common
    ).save_pretrained(tmp_path / "dspark")
    Eagle3SpeculatorConfig(
        transformer_layer_config=LlamaConfig(), eagle_aux_hidden_state_layer_ids=[5, 3], **common
    ).save_pretrained(tmp_path / "eagle3")
    for kind, taps in (("dspark", (1, 0)), ("eagle3", (5, 3))):
        args = arguments(target, speculator_type=kind, from_pretrained=str(tmp_path / kind))
        assert draft_reads(args).taps == taps


def test_what_a_k3_draft_reads(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    for fc_norm, stream in ((False, "prefix_sum"), (True, "attn_res_mixture")):
        draft_config(fc_norm=fc_norm).save_pretrained(tmp_path / stream)
        common = {"speculator_type": "k3_dspark", "target_layer_ids": None}
        file = str(tmp_path / stream / "config.json")
        from_file = draft_reads(arguments(target, draft_config=file, **common))
        assert (from_file.taps, from_file.stream) == ((3, 1), stream)
        draft(fc_norm=fc_norm).save_pretrained(tmp_path / f"trained-{stream}")
        trained = str(tmp_path / f"trained-{stream}")
        again = draft_reads(arguments(target, from_pretrained=trained, **common))
        assert again == from_file
    said = draft_reads(
        arguments(target, draft_config=file, stagetap_stream="attn_res_mixture", **common)
    )
    assert said.stream == "attn_res_mixture"


def test_it_takes_the_arguments(store: Path, export: Export, target: Path, tmp_path: Path) -> None:
    export("a", 7, 0)
    write_rows(open_dataset(store), tmp_path / "rows", "all", min_loss_tokens=1)
    args = arguments(target, stagetap_store=str(store))
    found = StageTapBackend.from_train_args(args, str(tmp_path / "rows")).get_cached(0)
    assert found is not None
    assert found["hidden_states"].shape == (7, 3, 16)
    with pytest.raises(Refused, match="needs --stagetap-store"):
        StageTapBackend.from_train_args(arguments(target), str(tmp_path / "rows"))


def test_another_target_is_refused(
    store: Path, export: Export, target: Path, tmp_path: Path
) -> None:
    export("a", 7, 0)
    rows = rows_of(tmp_path / "rows", (7, 0))
    other = tmp_path / "other"
    shutil.copytree(target, other)
    config = other / "config.json"
    config.write_text(config.read_text().replace('"rope_theta": 10000', '"rope_theta": 20000'))
    assert weights_fingerprint(other) != weights_fingerprint(target)
    args = arguments(other, stagetap_store=str(store))
    with pytest.raises(Refused, match=r"fingerprint .* --verifier-name-or-path.*-target any"):
        StageTapBackend.from_train_args(args, rows)
    args.stagetap_target = "any"
    StageTapBackend.from_train_args(args, rows)


@pytest.mark.parametrize("on_missing", ["generate", "raise", "skip", "warn"])
def test_rows_without_a_sample(
    store: Path,
    export: Export,
    target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    on_missing: str,
) -> None:
    export("a", 7, 0)
    args = arguments(target, stagetap_store=str(store), on_missing=on_missing)
    with pytest.raises(Refused, match=r"1 of 1 row of .*: write rows of this dataset"):
        StageTapBackend.from_train_args(args, rows_of(tmp_path / "foreign", (7, 9)))
    some = rows_of(tmp_path / "some", (7, 0), (7, 9))
    if on_missing in ("generate", "raise"):
        with pytest.raises(Refused, match=r"1 of 2 rows .* row 1 the first: capture them"):
            StageTapBackend.from_train_args(args, some)
        args.stagetap_wait_s = 0.1
    with caplog.at_level(logging.WARNING, "speculators"):
        transfer = StageTapBackend.from_train_args(args, some)
    assert "1 of 2 rows" in caplog.text
    if on_missing in ("skip", "warn"):
        assert transfer.get_cached(1) is None
        assert taken_lines() == [f"{LEFT_OUT}: 1 of 1 row that the trainer asked for"]
    else:
        with pytest.raises(SampleNotFound, match=r"row 1 of .* after 0.1 s"):
            transfer.get_cached(1)


def test_short_rows_are_left_out_and_counted(
    store: Path, export: Export, target: Path, tmp_path: Path
) -> None:
    """Their samples need not be there, whatever is said of rows without one."""
    export("a", 15, 0)
    rows = rows_of(tmp_path / "rows", (13, 9), (15, 0), (3, 8))
    args = arguments(target, stagetap_store=str(store), stagetap_min_loss_tokens=14)
    transfer = StageTapBackend.from_train_args(args, rows)
    assert taken_lines() == [
        f"2 of 3 rows of {rows} left out for having fewer than 14 tokens to learn from"
    ]
    assert isinstance(transfer.get_cached(0), SampleUnavailable)
    assert transfer.get_cached(1)["token_ids"].shape == (15,)
    for min_loss_tokens, total_seq_len in ((16, 64), (14, 13)):  # of a row that a batch cuts
        args.stagetap_min_loss_tokens, args.total_seq_len = min_loss_tokens, total_seq_len
        with pytest.raises(Refused, match=r"3 of 3 rows .* nothing is left to train on"):
            StageTapBackend.from_train_args(args, rows)
    assert not taken_lines()


def test_rows_that_lose_their_samples_are_counted_and_never_all_of_them(
    store: Path, export: Export, target: Path, tmp_path: Path
) -> None:
    """What `skip` passes over is said at the end, and training on nothing is an error."""
    export("a", 7, 0)
    export("b", 7, 1)
    rows = rows_of(tmp_path / "rows", (7, 0), (7, 1))
    args = arguments(target, stagetap_store=str(store), on_missing="skip")
    transfer = StageTapBackend.from_train_args(args, rows)
    assert transfer.get_cached(0) is not None
    assert not taken_lines()

    transfer = StageTapBackend.from_train_args(args, rows)
    in_a_worker = pickle.loads(pickle.dumps(transfer))
    open_dataset(store).delete("a")
    assert in_a_worker.get_cached(0) is None
    assert transfer.get_cached(1) is not None
    assert transfer.get_cached(0) is None
    assert taken_lines() == [
        "left out for having no sample: 2 of 3 rows that the trainer asked for"
    ]

    transfer = StageTapBackend.from_train_args(args, rows)
    assert transfer.get_cached(1) is not None
    open_dataset(store).delete("b")
    assert transfer.get_cached(0) is None
    with pytest.raises(SampleNotFound, match=r"none of the last 2 rows .* nothing is trained any"):
        transfer.get_cached(1)
    assert taken_lines() == [
        "left out for having no sample: 2 of 3 rows that the trainer asked for"
    ]


def test_a_sample_in_two_runs_is_refused_before_the_first_step(
    store: Path, export: Export, target: Path, tmp_path: Path
) -> None:
    export("a", 7, 0)
    what = tapped(weights_fingerprint=weights_fingerprint(target), id_convention=ID_CONVENTION)
    other = Engine(store, what, run="run-2")
    other.export("a", tokens=7)
    other.close()
    rows = rows_of(tmp_path / "rows", (7, 0))
    args = arguments(target, stagetap_store=str(store))
    with pytest.raises(Refused, match=r"in the runs run-1, run-2.*here: --stagetap-run RUN"):
        StageTapBackend.from_train_args(args, rows)
    args.stagetap_run = "run-1"
    assert StageTapBackend.from_train_args(args, rows).get_cached(0) is not None


def test_rows_that_teach_nothing(store: Path, export: Export, target: Path, tmp_path: Path) -> None:
    export("a", 7, 0)
    export("b", 7, 1)
    args = arguments(target, stagetap_store=str(store))
    idle = rows_of(tmp_path / "idle", (7, 0), (7, 1), prompt_tokens=7)
    with pytest.raises(Refused, match=r"none of 2 rows of .*idle has a token .* another --learn"):
        StageTapBackend.from_train_args(args, idle)
    late = rows_of(tmp_path / "late", (7, 0), (7, 1), prompt_tokens=5)
    args.total_seq_len = 5
    with pytest.raises(Refused, match=r"none of 2 rows .* within --total-seq-len 5: "):
        StageTapBackend.from_train_args(args, late)
    args.total_seq_len = 64
    StageTapBackend.from_train_args(args, late)
    assert not taken_lines()
    export("short", 5, 2)
    some = rows_of(tmp_path / "some", (5, 2), (7, 0), prompt_tokens=5)
    StageTapBackend.from_train_args(args, some)
    assert taken_lines() == [f"1 of 2 rows of {some} have no token to learn from"]


def test_what_was_read_leaves_the_store(
    store: Path, export: Export, target: Path, tmp_path: Path
) -> None:
    export("a", 7, 0)
    export("b", 7, 1)
    rows = rows_of(tmp_path / "rows", (7, 0), (7, 1))
    args = arguments(target, stagetap_store=str(store), stagetap_after_read="remove", epochs=2)
    with pytest.raises(Refused, match=r"remove and --epochs 2: .* give --epochs 1"):
        StageTapBackend.from_train_args(args, rows)
    args.epochs = 1
    found = StageTapBackend.from_train_args(args, rows).get_cached(1)
    assert found["hidden_states"].shape == (7, 3, 16)
    assert torch.equal(found["hidden_states"][:, 2], states(6, 7, 1).bfloat16())
    assert open_dataset(store).sample_ids == ["a"]
    export("b again", 7, 1)
    twice = rows_of(tmp_path / "twice", (7, 0), (7, 1), (3, 2), (7, 1), (3, 2))
    with pytest.raises(Refused, match=r"remove: rows 1 and 3 of .*twice have the same tokens"):
        StageTapBackend.from_train_args(args, twice)
    args.stagetap_after_read = "keep"
    args.on_missing = "skip"
    StageTapBackend.from_train_args(args, twice)


def test_speculators_launcher_is_told_where_to_go() -> None:
    with pytest.raises(Refused, match="stagetap serve"):
        StageTapBackend.build_kv_transfer_config(argparse.Namespace())
