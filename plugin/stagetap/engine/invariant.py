"""What must never happen in a step, and what happens then: the engine ends, at once and loudly."""

from __future__ import annotations

import os

BROKEN_EXIT = 70
"""Exit code of a worker that ended itself; EX_SOFTWARE of sysexits.h."""


class BrokenInvariant(RuntimeError):
    """A step went on without capture, or captured something else than whole rows."""


def end_worker(error: Exception) -> None:
    """End a worker process whose step has failed, which ends its engine within seconds.

    An exception alone would not: vLLM ends the engine for it as well, but only after the stages
    after this one have waited minutes for tensors that never come.
    """
    broken = "broken invariant: " if isinstance(error, BrokenInvariant) else ""
    line = f"stagetap: {broken}{type(error).__name__}: {error}; the engine ends\n"
    os.write(2, line.encode())
    os._exit(BROKEN_EXIT)
