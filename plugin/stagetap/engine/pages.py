"""Rows of one request out of the pages of a tap cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Gather = Callable[[int, int, torch.Tensor], None]


def page_reader(pages: torch.Tensor, block_ids: Sequence[int]) -> Gather:
    """A function that copies rows of one request into a host buffer.

    Args:
        pages: tap cache ``[num_blocks, L, block_size, H]``, any strides, on any device.
        block_ids: the request's pages, in token order.

    Returns:
        ``gather(start, end, out)`` copies the rows of tokens ``[start, end)`` into ``out``
        ``[end - start, L, H]`` and returns once ``out`` may be read. May be called from a thread.
    """
    if pages.is_cuda:
        return _device_reader(pages, block_ids)
    block_size = pages.shape[2]

    def gather(start: int, end: int, out: torch.Tensor) -> None:
        row = start
        while row < end:
            offset = row % block_size
            count = min(block_size - offset, end - row)
            page = pages[block_ids[row // block_size], :, offset : offset + count]  # [L, count, H]
            out[row - start : row - start + count].copy_(page.transpose(0, 1))
            row += count

    return gather


def _device_reader(pages: torch.Tensor, block_ids: Sequence[int]) -> Gather:
    """Gather on the device, then one copy to the (pinned) host buffer, on a stream of its own."""
    block_size = pages.shape[2]
    blocks = torch.tensor(block_ids, dtype=torch.int64)
    # Called between steps, so everything that wrote these pages is queued on the current stream.
    written = torch.cuda.current_stream(pages.device).record_event()

    def gather(start: int, end: int, out: torch.Tensor) -> None:
        tokens = torch.arange(start, end)
        with torch.cuda.device(pages.device), torch.cuda.stream(_copy_stream(pages.device)):
            torch.cuda.current_stream().wait_event(written)
            block = blocks[tokens // block_size].to(pages.device, non_blocking=True)
            offset = (tokens % block_size).to(pages.device, non_blocking=True)
            out.copy_(pages[block, :, offset], non_blocking=True)
            torch.cuda.current_stream().synchronize()

    return gather


_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return _copy_streams.setdefault(device, torch.cuda.Stream(device))
