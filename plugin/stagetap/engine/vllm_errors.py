"""What vLLM says against its arguments, in one line."""

from __future__ import annotations

from stagetap.wording import shortened

_CHARACTERS = 300


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
