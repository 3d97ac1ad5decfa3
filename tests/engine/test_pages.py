"""Rows of a request out of pages, for every place of a chunk in a page. No engine is started."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagetap.engine.pages import page_reader


@given(st.data())
def test_any_range_of_rows(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(1, 20))
    pages_needed = -(-count // block_size)
    spare = data.draw(st.integers(0, 2))
    block_ids = data.draw(st.permutations(range(1, 12 + 20)))[: pages_needed + spare]
    rows = torch.arange(count * 6, dtype=torch.float32).view(count, 2, 3)  # [T, L, H]
    # Strides as vLLM may lay a cache out: the two inner axes swapped in memory.
    pages = torch.full((40, block_size, 2, 3), -1.0).transpose(1, 2)  # [B, L, block_size, H]
    for row in range(count):
        pages[block_ids[row // block_size], :, row % block_size] = rows[row]
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start + 1, count))
    out = torch.empty(end - start, 2, 3)
    page_reader(pages, block_ids)(start, end, out)
    assert torch.equal(out, rows[start:end])


@pytest.mark.gpu
def test_pages_on_a_device() -> None:
    """Would show that rows gathered on the device and copied on a side stream arrive whole."""
    pages = torch.randn(8, 2, 4, 3, device="cuda")
    out = torch.empty(7, 2, 3).pin_memory()
    page_reader(pages, [5, 2, 7])(1, 8, out)
    flat = pages[[5, 2, 7]].transpose(1, 2).reshape(12, 2, 3)
    assert torch.equal(out, flat[1:8].cpu())
