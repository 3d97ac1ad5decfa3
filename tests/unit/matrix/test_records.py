"""The table of models: its records, its page, and that both are of one mind."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from matrix.records import JSON_FILE, MARKDOWN_FILE, Record, encode, merged, read_records
from matrix.render import render
from matrix.rows import MODELS, ROWS, Row, layer_ids, selected

CAPTURED_MODELS = 14
"""At least so many; each is a claim that users rely on."""


def record(row: Row, **found: Any) -> Record:
    """A record of a row that went well."""
    nothing = dict.fromkeys(field.name for field in dataclasses.fields(Record))
    return Record(
        **{
            **nothing,
            **{name: getattr(row, name) for name in ("model", "pp", "tp", "dtype", "options")},
            "architecture": "A",
            "against": "PP=1",
            "verdict": "bitwise",
            "max_abs": 0.0,
            "hf_error": 0.01,
            "hf_bound": 0.03,
            "note": "",
            "versions": {"vllm": "1"},
            **found,
        }
    )


def test_the_page_is_rendered_from_the_records() -> None:
    assert MARKDOWN_FILE.read_text("utf-8") == render(read_records()), "run ./justw matrix"


def test_the_records_are_of_the_table_in_its_order() -> None:
    """Every row of the table has been found out, and went as the table says."""
    records = read_records()
    assert JSON_FILE.read_text("utf-8") == encode(records)
    rows = {row.key: row for row in ROWS}
    assert [each.key for each in records] == list(rows), "run ./justw matrix"
    captured = {each.model for each in records if each.verdict != "refused"}
    assert len(captured) >= CAPTURED_MODELS
    for each in records:
        row = rows[each.key]
        assert each.verdict in {row.expect, "bitwise"}, each
        assert (each.verdict == "refused") == (each.hf_error is None), each
        if each.verdict == "refused":
            assert row.refusal in each.note, each
        else:
            assert each.hf_error is not None, each
            assert each.hf_bound is not None, each
            assert each.hf_error <= each.hf_bound, each
            assert row.hf_bound in {None, each.hf_bound}, each
        if each.verdict == "bounded":
            assert each.relative is not None, each
            assert row.bound is not None, each
            assert each.relative <= row.bound, each
        elif each.verdict == "bitwise":
            assert each.max_abs == 0, each


def test_a_row_that_failed_loses_its_record() -> None:
    rows = [Row("llama"), Row("qwen3"), Row("granite")]
    old = [record(row, note="old") for row in rows]
    found = merged(old, rows[:2], [record(rows[0], note="new")], rows)
    assert [(each.model, each.note) for each in found] == [("llama", "new"), ("granite", "old")]


def test_a_row_that_is_no_longer_tried_goes() -> None:
    assert merged([record(Row("llama")), record(Row("llama", pp=7))], [], [], [Row("llama")]) == [
        record(Row("llama"))
    ]


def test_records_outlive_a_file(tmp_path: Any) -> None:
    records = [record(row) for row in ROWS[:3]]
    path = tmp_path / "models.json"
    path.write_text(encode(records), "utf-8")
    assert read_records(path) == records
    assert set(json.loads(path.read_text())[0]) >= {"model", "pp", "tp", "verdict", "max_abs"}
    assert read_records(tmp_path / "none.json") == []


def test_the_page_says_why_a_row_is_bounded_or_refused() -> None:
    rows = [Row("llama"), Row("qwen3")]
    page = render(
        [
            record(rows[0], verdict="bounded", max_abs=0.5, relative=0.004, bound=0.01, note="why"),
            record(rows[1], verdict="refused", hf_error=None, max_abs=None, note="a | b"),
        ]
    )
    assert "| bounded | 0.5 | 0.01 (0.03) | relative error 0.004, at most 0.01; why |" in page
    assert "| refused |  |  | a \\| b |" in page
    assert "Captured: 1 models, 2 rows." in page


def test_the_page_names_what_has_no_record() -> None:
    rows = [Row("llama"), Row("qwen3", pp=3)]
    page = render([record(rows[0])], rows)
    assert page.endswith("claim nothing of them:\n\n- qwen3 PP=3 TP=1 bfloat16\n")
    assert "claim nothing" not in render([record(row) for row in rows], rows)


def test_rows_differ_and_can_be_chosen() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.model for row in ROWS} == set(MODELS)
    assert {row.model for row in selected(["glm4", "granite"])} == {"glm4", "granite"}
    assert selected([]) == list(ROWS)
    with pytest.raises(ValueError, match="no model 'glm5'"):
        selected(["glm5"])


def test_layer_ids_are_all_and_in_no_order() -> None:
    assert layer_ids(6) == [6, 0, 3, 5, 4, 2, 1]
    assert sorted(layer_ids(9)) == list(range(10))
