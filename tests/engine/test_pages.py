"""Rows of a request out of pages, for every place of a chunk in a page. No engine is started."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stagetap.engine.pages import TapPages, page_pieces, page_reader, row_pages, spanned_memory


def caches(block_size: int) -> list[torch.Tensor]:
    """[num_blocks, L, block_size, H], in all the ways in which vLLM may lay a cache out."""
    apart = torch.full((40, 2 * block_size + 1, 3), -1.0)[:, 1:]  # between them lie others' bytes
    return [
        torch.full((40, 2, block_size, 3), -1.0),
        torch.full((40, block_size, 2, 3), -1.0).transpose(1, 2),
        apart.unflatten(1, (2, block_size)),
    ]


@given(st.data())
def test_any_range_of_rows(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    count = data.draw(st.integers(1, 20))
    pages_needed = -(-count // block_size)
    spare = data.draw(st.integers(0, 2))
    block_ids = data.draw(
        st.one_of(
            st.permutations(range(1, 40)), st.integers(1, 15).map(lambda n: list(range(n, 40)))
        )
    )[: pages_needed + spare]
    rows = torch.arange(count * 6, dtype=torch.float32).view(count, 2, 3)  # [T, L, H]
    pages = row_pages(data.draw(st.sampled_from(caches(block_size))))
    assert pages.shape == (40, block_size, 2, 3)
    for row in range(count):
        pages[block_ids[row // block_size], row % block_size] = rows[row]
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start + 1, count))
    out = torch.empty(end - start, 2, 3)
    page_reader(pages, block_ids)(start, end, out)
    assert torch.equal(out, rows[start:end])
    pieces = page_pieces(pages, block_ids)(start, end)
    assert torch.equal(torch.cat(pieces), rows[start:end])
    memory = np.frombuffer(spanned_memory(pages), dtype=np.uint8)
    first, end_of_it = memory.ctypes.data, memory.ctypes.data + memory.nbytes
    for piece in pieces:
        assert piece.is_contiguous()
        assert first <= piece.data_ptr()
        assert piece.data_ptr() + piece.nbytes <= end_of_it


def test_pages_that_follow_each_other_are_one_piece() -> None:
    together, _, apart = (row_pages(cache) for cache in caches(4))
    lengths = [len(piece) for piece in page_pieces(together, [3, 4, 5, 9, 8, 2])(1, 23)]
    assert lengths == [11, 4, 4, 3]
    assert [len(piece) for piece in page_pieces(apart, [3, 4, 5])(1, 11)] == [3, 4, 3]


def test_how_one_tap_is_strided_means_nothing() -> None:
    cache = torch.zeros(5, 4, 3).as_strided((5, 1, 4, 3), (12, 99, 3, 1))
    assert row_pages(cache).is_contiguous()
    assert row_pages(cache).shape == (5, 4, 1, 3)


def test_a_page_whose_bytes_lie_apart_is_no_page() -> None:
    with pytest.raises(ValueError, match=r"pages of shape \(2, 4, 3\) have strides"):
        row_pages(torch.zeros(5, 2, 4, 6)[..., :3])


@given(st.data())
def test_rows_in_stripes_are_read_as_they_were_written(data: st.DataObject) -> None:
    """However many stripes a row is cut into, and however full the last one is."""
    taps, hidden = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 7))
    stripes = data.draw(st.integers(1, taps * hidden))
    width = -(-taps * hidden // stripes)
    stripes = -(-taps * hidden // width)
    block_size = data.draw(st.integers(1, 5))
    pages = TapPages.of(
        [torch.full((30, 1, block_size, width), -1.0) for _ in range(stripes)], (taps, hidden)
    )
    count = data.draw(st.integers(1, 20))
    block_ids = data.draw(st.permutations(range(1, 30)))
    rows = torch.arange(count * taps * hidden, dtype=torch.float32).view(count, taps, hidden)
    slots = [block_ids[row // block_size] * block_size + row % block_size for row in range(count)]
    pages.write(torch.tensor(slots), rows)
    start = data.draw(st.integers(0, count - 1))
    end = data.draw(st.integers(start + 1, count))
    out = torch.empty(end - start, taps, hidden)
    pages.reader(block_ids)(start, end, out)
    assert torch.equal(out, rows[start:end])
    assert (pages.whole_rows is None) == (stripes > 1 or taps > 1)


def test_a_cache_of_whole_rows_is_told_from_stripes() -> None:
    caches = [torch.zeros(4, 2, 5, 3)]
    whole = TapPages.of(caches, (2, 3)).whole_rows
    assert whole is not None
    assert whole.shape == (4, 5, 2, 3)
    for wrong in ([torch.zeros(4, 2, 5, 4)], caches * 2, [torch.zeros(4, 1, 5, 3)] * 3):
        with pytest.raises(ValueError, match=r"hold no \(2, 3\)"):
            TapPages.of(wrong, (2, 3))


@pytest.mark.gpu
def test_pages_on_a_device() -> None:
    """Would show that rows gathered on the device and copied on a side stream arrive whole."""
    pages = torch.randn(8, 4, 2, 3, device="cuda")
    out = torch.empty(7, 2, 3).pin_memory()
    page_reader(pages, [5, 2, 7])(1, 8, out)
    flat = pages[[5, 2, 7]].reshape(12, 2, 3)
    assert torch.equal(out, flat[1:8].cpu())
