"""The parts of ``stagetap demo-train`` that need no engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetap.cli.demo_train_job import Served, check_folder
from stagetap.cli.demo_train_prompts import FORMS, held_out_prompts, training_prompts
from stagetap.errors import Refused
from unit.cli.commands import Command


def test_held_out_prompts_are_of_subjects_that_no_draft_was_trained_on() -> None:
    training, held_out = training_prompts(), held_out_prompts(24)
    assert len({line["id"] for line in training}) == len(training) == 340
    assert len({line["id"] for line in held_out}) == len(held_out) == 24
    subjects = [{line["id"].partition(",")[0] for line in lines} for lines in (training, held_out)]
    assert not subjects[0] & subjects[1]
    texts = [line["messages"][0]["content"] for line in training]
    assert len(set(texts)) == 340
    assert all(form.count("{}") == 1 for form in FORMS)


def test_what_vllm_counted() -> None:
    counted = {
        "drafts": 10,
        "draft_tokens": 40,
        "accepted_tokens": 6,
        "accepted_tokens_per_pos": [4, 2, 0, 0],
    }
    served = Served.of({"outputs": [[1, 2]], "counted": counted})
    assert served.accepted_share == 0.15
    assert served.mean_length == 1.6
    assert served.accepted_at == [4, 2, 0, 0]
    plain = Served.of({"outputs": [[1, 2]], "counted": {}})
    assert (plain.accepted_share, plain.mean_length) == (0.0, 1.0)


def test_a_folder_of_something_else_is_left_alone(stagetap: Command, tmp_path: Path) -> None:
    check_folder(tmp_path / "new")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "dataset").mkdir()
    check_folder(folder)
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(Refused, match=r"mine holds thesis\.txt, which no demo made"):
        check_folder(folder)
    refused = stagetap("demo-train", "--out", folder)
    assert refused.code == 2
    assert sorted(path.name for path in folder.iterdir()) == ["dataset", "thesis.txt"]
