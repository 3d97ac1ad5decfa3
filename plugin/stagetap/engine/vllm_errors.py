"""What vLLM says against its arguments, in one line, and what to do about some of it."""

from __future__ import annotations

from stagetap.wording import shortened

_CHARACTERS = 300
_CURES = {
    "No common block size for": "leave block_size out, or give one that every backend named takes"
}


def said_by_vllm(error: Exception) -> str:
    """The first line of an error.

    pydantic's own message says which field it was about and how to read on; transformers' for an
    unknown model type is a paragraph on updating transformers. The first line is the cause.
    """
    details = getattr(error, "errors", None)  # of pydantic
    found = details() if callable(details) else None
    text = str(found[0]["msg"]).removeprefix("Value error, ") if found else str(error)
    lines = [line for line in text.splitlines() if line.strip()]
    return shortened(lines[0], _CHARACTERS) if lines else type(error).__name__


def with_cure(said: str) -> str:
    """The same and what to do about it, where vLLM does not say so and it is known."""
    cure = next((cure for start, cure in _CURES.items() if start in said), None)
    return f"{said.rstrip('.')}: {cure}" if cure else said
