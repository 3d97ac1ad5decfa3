"""Options of the connector and of a request: typed, bounded, refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from stagetap.errors import Refused
from stagetap.manifest import MAX_METADATA_BYTES
from stagetap.options import connector_options, request_options

STORE = {"layers": [2, 6], "store": "/data"}


def nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_defaults() -> None:
    options = connector_options(STORE)
    assert options.layers == (2, 6)
    assert options.export_default == "off"
    assert options.publish_timeout_s == 120
    request = request_options({})
    assert request.export
    assert request.completion == "committed"
    assert request.metadata == {}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slotz": 1}, "unknown key 'slotz'; known are layers, store"),
        ({"slots": 0}, "slots: expected int >= 1"),
        ({"slots": True}, "slots: expected int, got bool"),
        ({"slot_bytes": "1"}, "slot_bytes: expected int, got str"),
        ({"publish_timeout_s": 0}, "publish_timeout_s: expected float > 0"),
        ({"export_default": "yes"}, "export_default: invalid enum value 'yes'"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite: invalid enum value 'ignore'"),
        ({"max_consecutive_failures": -1}, "max_consecutive_failures: expected int >= 0"),
        ({"store": None}, "store: expected str, got null"),
        ({"store": ""}, "store is empty"),
        ({"run_id": ""}, "run_id is empty"),
        ({"layers": None}, "must be a list"),
        ({"layers": [2, 2]}, "2 is asked for more than once"),
    ],
)
def test_bad_connector_options_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(Refused) as refused:
        connector_options({**STORE, **changes})
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_option_is_named() -> None:
    with pytest.raises(Refused, match="missing required field layers"):
        connector_options({"store": "/data"})


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ("on", "must be an object, not str"),
        (None, "must be an object, not NoneType"),
        ({"id": "x"}, "unknown key 'id'; known are sample_id, export"),
        ({"sample_id": 1}, "sample_id: expected str"),
        ({"sample_id": ""}, "sample_id must have 1 to 1024 characters"),
        ({"sample_id": "x" * 1025}, "sample_id must have 1 to 1024 characters, not 1025"),
        ({"export": 1}, "export: expected bool, got int"),
        ({"include_output": "true"}, "include_output: expected bool"),
        ({"completion": "later"}, "completion: invalid enum value 'later'"),
        ({"metadata": "x"}, "metadata: expected object, got str"),
        ({"metadata": {"x": float("nan")}}, "metadata does not survive JSON"),
        ({"metadata": {"x": ["\ud800"]}}, "metadata cannot be written as JSON"),
        ({"metadata": {"x": [{"y": 10**30}]}}, f"metadata: {10**30} does not fit 64 bits"),
        ({"metadata": {"d": nested(2000)}}, "metadata"),
        ({"sample_id": "a\ud800"}, "lone surrogate at position 1"),
        ({"prefill_only": True, "include_output": True}, "contradict"),
    ],
)
def test_bad_request_options_are_named(params: Any, named: str) -> None:
    with pytest.raises(Refused) as refused:
        request_options(params)
    assert named in str(refused.value)
    assert "kv_transfer_params.stagetap" in str(refused.value)


def test_metadata_has_a_bound() -> None:
    fits = {"t": "x" * (MAX_METADATA_BYTES - len('{"t":""}'))}
    assert request_options({"metadata": fits}).metadata == fits
    with pytest.raises(Refused, match=f"metadata is {MAX_METADATA_BYTES + 1} bytes"):
        request_options({"metadata": {"t": fits["t"] + "x"}})


@pytest.mark.parametrize(
    ("store", "run_id", "expected"),
    [
        ("mooncake://h:1/a%2Fb", None, ("mooncake://h:1/a%2Fb", "a/b")),
        ("mooncake://h:1", "r", ("mooncake://h:1/r", "r")),
        ("mooncake://h:1/r?hard_pin=off", "r", ("mooncake://h:1/r?hard_pin=off", "r")),
        ("/directory", None, ("/directory", None)),
        ("/directory", "r", ("/directory", "r")),
    ],
)
def test_a_mooncake_address_and_run_id_name_one_run(
    store: str, run_id: str | None, expected: tuple[str, str | None]
) -> None:
    options = connector_options({"layers": [1], "store": store, "run_id": run_id})
    assert (options.store, options.run_id) == expected


@pytest.mark.parametrize(
    ("store", "run_id", "said"),
    [
        ("mooncake://h:1", None, "names no run"),
        ("mooncake://h:1/r", "s", "'s'"),
        ("mooncake://h:1/r?sise=1", None, "sise"),
    ],
)
def test_a_mooncake_address_that_names_no_run_or_another_is_refused(
    store: str, run_id: str | None, said: str
) -> None:
    with pytest.raises(Refused, match=said):
        connector_options({"layers": [1], "store": store, "run_id": run_id})
