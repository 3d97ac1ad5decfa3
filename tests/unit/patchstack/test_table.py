"""The numbers in patches/README.md."""

from __future__ import annotations

import pytest

from stagetap.errors import StageTapError
from stagetap.patchstack.series import Series
from stagetap.patchstack.table import put_tables, render_table
from unit.patchstack.synthetic import empty_series

README = "before\n<!-- table: begin -->\nstale\n<!-- table: end -->\nafter\n"


def test_a_row_a_patch_and_the_sum(series: Series) -> None:
    table = render_table(series)
    assert "| 0001-hook-the-model-config | 2 | 2 | 1 | no |" in table
    assert table.splitlines()[-1] == "| **all, at most 300 added** | 3 | 5 | 2 | |"


def test_only_the_block_changes_and_only_once(series: Series) -> None:
    once = put_tables(README, [series, empty_series("0.33.0")])
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "### vLLM 0.33.0" in once
    assert "stale" not in once
    assert put_tables(once, [series, empty_series("0.33.0")]) == once


def test_a_readme_without_markers_is_an_error(series: Series) -> None:
    with pytest.raises(StageTapError, match="markers"):
        put_tables("no markers", [series])
