"""Rows of one request out of the pages of a tap cache: where they are, or copied out.

vLLM moves and counts pages, and never looks into one of ours. So what a page looks like inside is
ours to say: rows [L, H] in token order, which is how a fragment stores them. A range of tokens is
then a few pieces of memory that can be copied, or stored, as they are.

Where a block of vLLM's has several pages, as in models with several kinds of attention, rows are
cut into as many stripes of columns: what belongs together then lies apart, and is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Gather = Callable[[int, int, torch.Tensor], None]
Pieces = Callable[[int, int], list[torch.Tensor]]


@dataclass(frozen=True)
class TapPages:
    """The pages of one stage's tap cache.

    Attributes:
        stripes: pages of rows, ``[num_blocks, block_size, L, H]`` when it is one, else
            ``[num_blocks, block_size, 1, width]`` each: consecutive columns of the flattened row.
        row: ``(L, H)``.
    """

    stripes: tuple[torch.Tensor, ...]
    row: tuple[int, int]

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor], row: tuple[int, int]) -> TapPages:
        """Views of what vLLM made, ``[num_blocks, heads, block_size, head_size]`` each.

        Raises:
            ValueError: the shapes are not those of ``row``, or a page's bytes lie apart.
        """
        stripes = tuple(map(row_pages, caches))
        shapes = {tuple(stripe.shape[2:]) for stripe in stripes}
        whole = shapes == {row} and len(stripes) == 1
        if not whole and (len(shapes) != 1 or not _covers(shapes.pop(), len(stripes), row)):
            raise ValueError(f"pages of shapes {[tuple(c.shape) for c in caches]} hold no {row}")
        return cls(stripes, row)

    @property
    def whole_rows(self) -> torch.Tensor | None:
        """``[num_blocks, block_size, L, H]``, unless rows are cut into stripes."""
        (first, *rest) = self.stripes
        return None if rest or tuple(first.shape[2:]) != self.row else first

    @property
    def block_size(self) -> int:
        """Tokens of a page."""
        return self.stripes[0].shape[1]

    @property
    def nbytes(self) -> int:
        """Of all pages."""
        return sum(stripe.numel() * stripe.element_size() for stripe in self.stripes)

    def write(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Put the rows of a step where they belong.

        Args:
            slots: ``[T]``, none negative.
            rows: ``[T, L, H]``.
        """
        pages, places = slots // self.block_size, slots % self.block_size
        if (whole := self.whole_rows) is not None:
            whole[pages, places] = rows
            return
        flat = rows.reshape(len(rows), 1, -1)
        for stripe, start, end in self._columns():
            stripe[pages, places, :, : end - start] = flat[..., start:end]

    def reader(self, block_ids: Sequence[int]) -> Gather:
        """A function that copies rows of one request into a host buffer, see :func:`page_reader`.

        Args:
            block_ids: the request's blocks, in token order.
        """
        if (whole := self.whole_rows) is not None:
            return page_reader(whole, block_ids)
        readers = [
            (page_reader(stripe[..., : end - start], block_ids), start, end)
            for stripe, start, end in self._columns()
        ]

        def gather(start: int, end: int, out: torch.Tensor) -> None:
            flat = out.view(end - start, 1, -1)
            for read, first, last in readers:
                read(start, end, flat[..., first:last])

        return gather

    def _columns(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Each stripe with the columns of the flattened row that it holds."""
        width = self.stripes[0].shape[3]
        total = self.row[0] * self.row[1]
        for number, stripe in enumerate(self.stripes):
            yield stripe, number * width, min((number + 1) * width, total)


def _covers(shape: tuple[int, ...], stripes: int, row: tuple[int, int]) -> bool:
    """Whether so many stripes of that shape hold a row, and none is empty."""
    heads, width = shape
    return heads == 1 and (stripes - 1) * width < row[0] * row[1] <= stripes * width


def row_pages(cache: torch.Tensor) -> torch.Tensor:
    """The same memory as pages of rows, ``[num_blocks, block_size, L, H]``: a view.

    Args:
        cache: what vLLM made, ``[num_blocks, L, block_size, H]``, its two inner axes in either
            order in memory; pages may lie apart.

    Raises:
        ValueError: the bytes of one page do not lie together.
    """
    blocks, taps, block_size, hidden = cache.shape
    page = cache[0]
    if not (page.is_contiguous() or page.transpose(0, 1).is_contiguous()):
        raise ValueError(f"pages of shape {tuple(page.shape)} have strides {page.stride()}")
    return cache.as_strided(
        (blocks, block_size, taps, hidden), (cache.stride(0), taps * hidden, hidden, 1)
    )


def page_pieces(pages: torch.Tensor, block_ids: Sequence[int]) -> Pieces:
    """A function that says where rows of one request lie.

    Args:
        pages: ``[num_blocks, block_size, L, H]``, see :func:`row_pages`.
        block_ids: the request's pages, in token order.

    Returns:
        ``pieces(start, end)`` gives the rows of tokens ``[start, end)``, in order, as views
        ``[n, L, H]``, each contiguous and as long as can be: pages that follow each other in memory
        are one piece.
    """
    block_size = pages.shape[1]
    adjoining = pages.flatten(0, 1) if pages.is_contiguous() else None  # [num_slots, L, H]

    def pieces(start: int, end: int) -> list[torch.Tensor]:
        runs = _runs(block_ids, block_size, start, end, adjoining is not None)
        if adjoining is not None:
            return [adjoining[slot : slot + count] for slot, count in runs]
        return [pages[slot // block_size].narrow(0, slot % block_size, n) for slot, n in runs]

    return pieces


def spanned_memory(pages: torch.Tensor) -> memoryview:
    """All bytes from the first to the last of these pages, in host memory."""
    elements = (pages.shape[0] - 1) * pages.stride(0) + pages[0].numel()
    return memoryview(pages.as_strided((elements,), (1,)).view(torch.uint8).numpy())


def page_reader(pages: torch.Tensor, block_ids: Sequence[int]) -> Gather:
    """A function that copies rows of one request into a host buffer.

    Args:
        pages: ``[num_blocks, block_size, L, H]``, see :func:`row_pages`, on any device.
        block_ids: the request's pages, in token order.

    Returns:
        ``gather(start, end, out)`` copies the rows of tokens ``[start, end)`` into ``out``
        ``[end - start, L, H]`` and returns once ``out`` may be read. May be called from a thread.
    """
    if pages.is_cuda:
        return _device_reader(pages, block_ids)
    pieces = page_pieces(pages, block_ids)

    def gather(start: int, end: int, out: torch.Tensor) -> None:
        target = out.view(torch.uint8).numpy()
        row = 0
        for piece in pieces(start, end):
            # By numpy: on this one thread, and without the interpreter's lock.
            np.copyto(target[row : row + len(piece)], piece.view(torch.uint8).numpy())
            row += len(piece)

    return gather


def _runs(
    block_ids: Sequence[int], block_size: int, start: int, end: int, adjoining: bool
) -> Iterator[tuple[int, int]]:
    """Tokens [start, end) as (first slot, number) of slots that follow each other.

    A slot is a place for one row, counted over all pages. Pages are joined when `adjoining`.
    """
    first, count = 0, 0
    row = start
    while row < end:
        offset = row % block_size
        slot = block_ids[row // block_size] * block_size + offset
        length = min(block_size - offset, end - row)
        if count and adjoining and slot == first + count:
            count += length
        else:
            if count:
                yield first, count
            first, count = slot, length
        row += length
    if count:
        yield first, count


def _device_reader(pages: torch.Tensor, block_ids: Sequence[int]) -> Gather:
    """Gather on the device, then one copy to the (pinned) host buffer, on a stream of its own."""
    block_size = pages.shape[1]
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    # Called between steps, so everything that wrote these pages is queued on the current stream.
    written = torch.cuda.current_stream(pages.device).record_event()

    def gather(start: int, end: int, out: torch.Tensor) -> None:
        tokens = torch.arange(start, end)
        with torch.cuda.device(pages.device), torch.cuda.stream(_copy_stream(pages.device)):
            torch.cuda.current_stream().wait_event(written)
            block = blocks[tokens // block_size].to(pages.device, non_blocking=True)
            offset = (tokens % block_size).to(pages.device, non_blocking=True)
            out.copy_(pages[block, offset], non_blocking=True)
            torch.cuda.current_stream().synchronize()

    return gather


_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return _copy_streams.setdefault(device, torch.cuda.Stream(device))
