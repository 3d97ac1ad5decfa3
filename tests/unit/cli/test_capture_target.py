"""Where a capture goes, and what is refused because nobody could ever read it."""

from __future__ import annotations

import pytest

from stagetap.cli.capture_target import CaptureTarget, capture_target
from stagetap.errors import Refused

STORE = "mooncake://127.0.0.1:1"


def target(out: str, run: str | None = None, **changes: object) -> CaptureTarget:
    options: dict[str, object] = {"resume": False, "keep_free_mib": None, **changes}
    return capture_target(out, run, **options)  # type: ignore[arg-type]


def test_a_directory() -> None:
    assert target("out") == CaptureTarget("out", "capture", 512 * 1024**2)
    assert target("out", "mine", resume=True, keep_free_mib=0) == CaptureTarget("out", "mine", 0)


@pytest.mark.parametrize(
    ("out", "run", "expected"),
    [
        (f"{STORE}/a?global_segment_size=0", None, "a"),
        (f"{STORE}/a?global_segment_size=0", "a", "a"),
        (f"{STORE}?global_segment_size=0", "b", "b"),
        (f"{STORE}?global_segment_size=0", None, "capture"),
    ],
)
def test_a_mooncake_run(out: str, run: str | None, expected: str) -> None:
    address = f"{STORE}/{expected}?global_segment_size=0"
    assert target(out, run) == CaptureTarget(address, expected, None)


@pytest.mark.parametrize(
    ("out", "changes", "said"),
    [
        (f"{STORE}/a", {}, rf"goes with the engine.*say {STORE}/a\?global_segment_size=0"),
        (f"{STORE}/a?global_segment_size=0", {"run": "b"}, "names run 'a' and run_id is 'b'"),
        (f"{STORE}/a?global_segment_size=0", {"resume": True}, "--resume cannot tell"),
        (f"{STORE}/a?global_segment_size=0", {"keep_free_mib": 3}, "is on no disk"),
        (f"{STORE}/a?global_segment_size=0&x=1", {}, "unknown option 'x'"),
        ("out", {"run": ""}, "--run is empty"),
    ],
)
def test_refused(out: str, changes: dict[str, object], said: str) -> None:
    with pytest.raises(Refused, match=said):
        target(out, **changes)  # type: ignore[arg-type]
