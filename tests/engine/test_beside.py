"""Beside other connectors: both work, and tokens that ran no forward pass here yield no row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.harness import TESTS, Arm
from stagetap.engine.environment import engine_environment

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def seen(checkpoint: Callable[..., str], stores: Callable[[str], Path]) -> dict[str, Any]:
    arm = Arm(
        "engine.beside:beside_others",
        None,
        {"model": checkpoint("llama"), "store": str(stores("beside"))},
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "PYTHONPATH": str(TESTS / "faults"),
            **engine_environment(2, 1),  # vLLM reads some of it when it is imported
        },
    )
    found: dict[str, Any] = arm.run()
    return found


def test_a_producing_connector_and_stagetap_both_work(seen: dict[str, Any]) -> None:
    states = [one["said"].get("state") for one in seen["ended"]]
    assert states == ["committed"] * 4 + [None]
    assert set(seen["params"]) == {"stagetap", "producing"}
    assert list(seen["tokens"].values()) == seen["prompts"]
    assert seen["left"] == {}


def test_a_hit_of_external_kv_never_yields_a_row(seen: dict[str, Any]) -> None:
    for name in ("hit", "running"):
        said = seen[name]["said"]
        assert said["state"] == "failed", name
        assert "ran no forward pass here" in said["error"]
    assert seen["later"]["said"]["status"] == 503
    assert "ran no forward pass here" in seen["later"]["said"]["error"]
    assert seen["ordinary"]["reason"] == "length"
    assert seen["readable"] == [f"m-{n}" for n in range(4)]
    assert seen["left_at_the_end"] == {}
