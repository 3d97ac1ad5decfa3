"""What must never happen, and what happens then: the engine ends, at once and loudly."""

from __future__ import annotations

import os

BROKEN_EXIT = 70
"""Exit code of a worker that ended itself; EX_SOFTWARE of sysexits.h."""


class BrokenInvariant(RuntimeError):
    """A step went on without capture, or captured something else than whole rows."""


def end_worker(error: BrokenInvariant) -> None:
    """End a worker process, which ends its engine within seconds.

    An exception alone would not: the stages after this one wait for tensors that never come, and
    vLLM waits for those stages until its RPC times out.
    """
    os.write(2, f"stagetap: broken invariant: {error}; the engine ends\n".encode())
    os._exit(BROKEN_EXIT)
