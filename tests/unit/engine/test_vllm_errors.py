"""Errors of vLLM in one line."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, ValidationError, field_validator

from stagetap.engine.vllm_errors import said_by_vllm, with_cure

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


def test_a_cure_that_vllm_does_not_give() -> None:
    said = "ValueError: No common block size for 16 (CPU_ATTN: [MultipleOf(32)])."
    assert with_cure(said).startswith(f"{said[:-1]}: leave block_size out")
    assert with_cure("ValueError: x.") == "ValueError: x."
