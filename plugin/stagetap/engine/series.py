"""Is this process's vLLM the patched one? Asked in the front end, the engine and every worker."""

from __future__ import annotations

from functools import cache

from stagetap.patchstack.operations import require_applied


@cache
def check_series() -> str:
    """Digest of the patch series that this vLLM carries.

    Raises:
        Refused: the series is not applied, or the vLLM is not the one that it was made for.
    """
    return require_applied().series.digest
