"""The kinds of parallelism that a capture does not take. Pure."""

from __future__ import annotations

from typing import Protocol

from stagetap.errors import Refused


class Parallelism(Protocol):
    """Sizes as vLLM's ``ParallelConfig`` and its engine arguments both name them."""

    data_parallel_size: int
    decode_context_parallel_size: int
    prefill_context_parallel_size: int


def check_parallel(parallel: Parallelism) -> None:
    """Raises Refused for replicas in one engine, and for context parallelism."""
    if parallel.data_parallel_size > 1:
        raise Refused(
            "data_parallel_size > 1 is not in this version; start one engine per replica, each "
            "on the same store"
        )
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise Refused(
            "context parallelism spreads one token's states over ranks; set "
            "decode_context_parallel_size and prefill_context_parallel_size to 1"
        )
