"""How a tap cache is cut for blocks of several pages. No engine is started."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.engine.capture.stripes import cut


@pytest.mark.parametrize(
    ("rows", "pages", "counts", "width"),
    [
        ([896], [2], (2,), 448),
        ([512, 384], [1, 1], (1, 1), 512),
        ([768, 256], [5, 5], (5, 2), 154),
        ([0, 300], [2, 3], (0, 3), 100),
        ([100, 0], [0, 4], (1, 0), 100),  # a stage without caches of its own has one page
    ],
)
def test_all_stages_have_stripes_of_one_width(
    rows: list[int], pages: list[int], counts: tuple[int, ...], width: int
) -> None:
    assert cut(rows, pages) == (counts, width)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 12)), min_size=1, max_size=4).filter(
        lambda stages: any(row for row, _ in stages)
    )
)
def test_no_stage_has_more_stripes_than_pages_or_an_empty_one(
    stages: list[tuple[int, int]],
) -> None:
    rows, pages = zip(*stages, strict=True)
    counts, width = cut(rows, pages)
    for row, page, count in zip(rows, pages, counts, strict=True):
        assert count <= page
        assert (count - 1) * width < row <= count * width or row == count == 0
