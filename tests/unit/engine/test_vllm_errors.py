"""Errors of vLLM in one line."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from stagetap.engine.vllm_errors import said_by_vllm

PARAGRAPH = "The model type `x` is not recognized.\n\nYou can update Transformers with:\n  pip ..."


class Config(BaseModel):
    size: int

    @field_validator("size")
    @classmethod
    def _refuse(cls, size: int) -> int:
        raise ValueError(PARAGRAPH)


def test_the_first_line_is_the_cause() -> None:
    assert said_by_vllm(ValueError(PARAGRAPH)) == "The model type `x` is not recognized."
    assert said_by_vllm(ValueError()) == "ValueError"
    assert len(said_by_vllm(ValueError("x" * 100_000))) <= 300
    with pytest.raises(ValidationError) as caught:
        Config(size=1)
    assert said_by_vllm(caught.value) == "The model type `x` is not recognized."
