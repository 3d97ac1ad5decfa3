"""Engine arguments that change what a model computes: two that differ there share no store."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from stagetap.engine.agreement import deciding_args


def _config(cache_dtype: str = "auto", **model: Any) -> Any:
    said = {"model_impl": "auto", "quantization": None, "hf_overrides": {}} | model
    return SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype=cache_dtype), model_config=SimpleNamespace(**said)
    )


def _halve(config: Any) -> Any:
    return config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (_config(), {}),
        (_config(hf_overrides=None), {}),
        (_config("fp8"), {"kv_cache_dtype": "fp8"}),
        (_config(quantization="fp8"), {"quantization": "fp8"}),
        (_config(model_impl="transformers"), {"model_impl": "transformers"}),
        (
            _config(hf_overrides={"rope_theta": 500.0, "a": [1]}),
            {"hf_overrides": '{"a": [1], "rope_theta": 500.0}'},
        ),
        (_config(hf_overrides=_halve), {"hf_overrides": f"{__name__}._halve"}),
    ],
)
def test_what_was_given_is_told_as_text(config: Any, expected: dict[str, str]) -> None:
    assert deciding_args(config) == expected
