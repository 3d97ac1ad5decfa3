"""Prompts in the order in which speculators' trainer reads their rows."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from speculators.train.dataloader import create_train_val_loaders

from stagetap import Refused
from stagetap.prompts import read_prompt_file
from stagetap.training.order import asked_rows
from stagetap.training.row_prompts import PromptsReport, write_prompts
from stagetap.training.transfer import Source, StageTapTransfer
from store_samples import token_ids
from training.test_transfer import rows_of

LENGTHS = [5, 9, 3, 12, 7, 4, 11, 6, 8, 10, 5, 7, 9, 3, 6, 12, 4, 8, 5, 10]


def test_it_is_the_order_of_the_trainers_own_loaders(store: Path, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "rows", *((tokens, seed) for seed, tokens in enumerate(LENGTHS)))
    source = Source(uri=str(store), run=None, stream="residual", verify=False, wait_s=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pinned memory without an accelerator
        loaders = create_train_val_loaders(
            data_path=rows,
            total_seq_len=16,
            hidden_states_dtype=torch.bfloat16,
            transfer=StageTapTransfer(source, rows, (0, 6), may_miss=True),
            vllm_endpoint="",
            on_missing="skip",
            verifier_name_or_path="",
            request_timeout=None,
            max_retries=0,
            generation_validation_retries=0,
            max_consecutive_generation_failures=1,
            hidden_size=16,
            num_target_layers=1,
            num_workers=0,
            prefetch_factor=1,
            preprocess=None,
            train_data_ratio=0.8,
            seed=7,
        )
    training, validation = (
        [int(row) for batch in loader.batch_sampler for row in batch] for loader in loaders
    )
    expected = [*training, *(16 + row for row in validation)]
    assert asked_rows(LENGTHS, 1, 16, seed=7, train_data_ratio=0.8) == expected
    assert expected != sorted(expected)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_each_row_once_and_ranks_side_by_side(ranks: int) -> None:
    order = asked_rows(LENGTHS, ranks, 16, seed=7, train_data_ratio=0.8)
    assert len(set(order)) == len(order)
    split = [row < 16 for row in order]
    assert split == sorted(split, reverse=True)
    assert asked_rows(LENGTHS, ranks, 16, seed=8, train_data_ratio=0.8) != order


def test_prompts_are_what_the_trainer_will_read(tmp_path: Path) -> None:
    rows_read = [(tokens, seed) for seed, tokens in enumerate(LENGTHS)]
    rows = rows_of(tmp_path / "rows", *rows_read)
    file = tmp_path / "prompts.jsonl"
    settings = {"ranks": 2, "total_seq_len": 16, "seed": 7, "train_data_ratio": 0.8}
    report = write_prompts(Path(rows), file, min_loss_tokens=5, **settings)
    order = asked_rows(LENGTHS, 2, 16, seed=7, train_data_ratio=0.8)
    kept = [row for row in order if LENGTHS[row] >= 5]
    assert 0 < len(kept) < len(order)
    assert len(read_prompt_file(file)) == len(kept)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"row-{row}" for row in kept]
    assert [line["prompt_token_ids"] for line in lines] == [
        token_ids(LENGTHS[row], row).tolist() for row in kept
    ]
    assert report == PromptsReport(
        prompts=len(kept),
        tokens=sum(LENGTHS[row] for row in kept),
        too_few=len(order) - len(kept),
        never_asked=len(LENGTHS) - len(order),
    )
    with pytest.raises(Refused, match=r"prompts\.jsonl cannot be written \(File exists\)"):
        write_prompts(Path(rows), file, min_loss_tokens=5, **settings)
    with pytest.raises(Refused, match=r"ask for none of 20 rows"):
        write_prompts(Path(rows), tmp_path / "none", min_loss_tokens=99, **settings)
    assert not (tmp_path / "none").exists()
    with pytest.raises(Refused, match=r"none of .* row.* has a token to learn"):
        write_prompts(
            Path(rows_of(tmp_path / "idle", *rows_read, prompt_tokens=12)),
            tmp_path / "none",
            min_loss_tokens=5,
            **settings,
        )
    assert not (tmp_path / "none").exists()
    with pytest.raises(Refused, match="nowhere is no folder of rows"):
        write_prompts(tmp_path / "nowhere", file, min_loss_tokens=5, **settings)


def test_what_a_batch_cuts_off_is_not_learnt_from(tmp_path: Path) -> None:
    rows = Path(rows_of(tmp_path / "rows", *((8, seed) for seed in range(20)), prompt_tokens=4))
    settings = {"ranks": 1, "seed": 7, "train_data_ratio": 0.8, "min_loss_tokens": 3}
    whole = write_prompts(rows, tmp_path / "whole", total_seq_len=8, **settings)
    assert whole.prompts == 20
    with pytest.raises(Refused, match=r"ask for none of 20 rows .* 20 of them having fewer than 3"):
        write_prompts(rows, tmp_path / "cut", total_seq_len=6, **settings)
