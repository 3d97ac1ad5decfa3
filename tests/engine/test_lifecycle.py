"""Every exporting request ends in one way that its sender learns, and leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.harness import TESTS, Arm
from engine.scenarios.failing import FAILURES

pytestmark = pytest.mark.engine

TIMEOUT_SECONDS = 3.0
LAYERS = [0, 3, 6]


def scenarios(
    names: list[str],
    checkpoint: Callable[..., str],
    store: Path,
    folder: Path,
    *,
    tp: int = 1,
    **environment: str,
) -> dict[str, Any]:
    """Run scenarios of `engine.scenarios` in one engine of two stages; its core is in-process."""
    faults = folder / "faults.json"
    faults.write_text("[]")
    session = {
        "model": checkpoint("llama"),
        "layers": LAYERS,
        "store": str(store),
        "pp": 2,
        "tp": tp,
        "connector_options": {
            "slots": 4,
            "slot_bytes": 16384,
            "writer_threads": 2,
            "publish_timeout_s": TIMEOUT_SECONDS,
            "max_consecutive_failures": 3,
        },
        "engine_args": {
            "skip_tokenizer_init": True,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "max_model_len": 256,
            "block_size": 32,
            "num_gpu_blocks_override": 26,
        },
    }
    arm = Arm(
        "engine.scenarios.run:all_scenarios",
        session,
        {"store": str(store), "fault_file": str(faults), "names": names},
        {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "PYTHONPATH": str(TESTS / "faults"),
            "STAGETAP_FAULTS": str(faults),
            **environment,
        },
    )
    return arm.run(timeout=600)


@pytest.fixture(scope="module")
def seen(
    checkpoint: Callable[..., str],
    stores: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Any]:
    names = [
        "completion", "failure", "every_third", "hang", "quarantine", "breaker", "hung_commit",
        "hung_look", "slow_look", "aborts", "preemption", "prefill_only",
        # Last: its NaNs stay in vLLM's KV pages, where attention on CPU meets them again.
        "nonfinite",
    ]  # fmt: skip
    found = scenarios(names, checkpoint, stores("lifecycle"), tmp_path_factory.mktemp("lifecycle"))
    return lambda name: whole(found[name])


@pytest.fixture(scope="module")
def seen_async(
    checkpoint: Callable[..., str],
    stores: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Any]:
    """The same with vLLM's asynchronous scheduler, which GPUs run by default."""
    found = scenarios(
        ["completion", "slow_look", "aborts", "preemption", "prefill_only"],
        checkpoint,
        stores("lifecycle-async"),
        tmp_path_factory.mktemp("lifecycle-async"),
        STAGETAP_TEST_ASYNC="1",
    )
    return lambda name: whole(found[name])


def whole(scenario: dict[str, Any]) -> dict[str, Any]:
    """What a scenario saw; every table of the engine was empty at its end."""
    assert "broken" not in scenario, scenario["broken"]
    assert scenario["left"] == {}
    return scenario


@pytest.fixture(params=["seen", "seen_async"], ids=["synchronous", "asynchronous"])
def either(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Both schedulers."""
    found: Callable[[str], Any] = request.getfixturevalue(request.param)
    return found


def test_committed_waits_for_the_commit_and_accepted_does_not(
    either: Callable[[str], Any],
) -> None:
    found = either("completion")
    assert found["accepted"]["ended"]["said"]["state"] == "accepted"
    assert not found["accepted"]["readable"]
    assert found["committed"]["ended"]["said"]["state"] == "committed"
    assert found["committed"]["readable"]
    assert found["committed"]["ended"]["seconds"] >= 1
    assert found["afterwards"] == ["c-accepted", "c-committed"]


@pytest.mark.parametrize(("on", "do", "stage"), FAILURES)
def test_a_failing_part_fails_its_request_alone(
    seen: Callable[[str], Any], on: str, do: str, stage: int | None
) -> None:
    name = f"f-{on}-{do}"
    found = seen("failure")[name]
    assert found["ended"]["reason"] == "error"
    assert found["ended"]["seconds"] < 5
    said = found["ended"]["said"]
    assert said["state"] == "failed"
    assert said["status"] == 500
    where = "commit" if stage is None else f"stage {stage}"
    for part in (repr(name), where, "store", "injected"):
        assert part in said["error"]
    assert found["beside"]["reason"] == "length"
    assert not found["readable"]
    assert found["retry"]["said"]["state"] == "committed"
    assert found["retry_readable"]


def test_failures_are_told_one_by_one(seen: Callable[[str], Any]) -> None:
    found = seen("every_third")
    assert found["states"].count("failed") == 3
    assert found["states"].count("committed") == 6
    assert found["agree"]
    assert found["used_blocks"] == 0


def test_a_hung_write_fails_in_time_and_holds_only_its_slot(seen: Callable[[str], Any]) -> None:
    found = seen("hang")
    assert found["ended"]["reason"] == "error"
    assert TIMEOUT_SECONDS <= found["ended"]["seconds"] < TIMEOUT_SECONDS + 5
    assert "stages [1] did not publish" in found["ended"]["said"]["error"]
    held = found["held"]
    assert held["used_blocks"] == 0
    assert held["requests"] == 0
    assert held["workers"][1]["slots_in_use"] == 1
    assert held["workers"][1]["hung_writes"] == 1
    assert found["others"]["said"]["state"] == "committed"
    assert not found["late"]
    assert found["retry"]["said"]["state"] == "committed"


def test_a_full_quarantine_suspends_exporting_until_a_write_returns(
    seen: Callable[[str], Any],
) -> None:
    found = seen("quarantine")
    assert [one["said"]["state"] for one in found["hung"]] == ["failed"] * 2
    said = found["refused"]["said"]
    assert said["status"] == 503
    for part in ("suspended", "stage 0", "2 writes", "hang"):
        assert part in said["error"]
    assert found["refused"]["seconds"] < 3
    assert found["ordinary"]["reason"] == "length"
    assert found["after"]["said"]["state"] == "committed"


def test_failures_in_a_row_suspend_exporting_and_a_probe_resumes_it(
    seen: Callable[[str], Any],
) -> None:
    found = seen("breaker")
    assert [one["said"]["status"] for one in found["failed"]] == [500] * 2
    assert "injected" in found["captured"]["error"]
    assert not found["captured"]["suspended"]
    assert "3 failed samples in a row" in found["left_over"]["error"]
    assert found["left_over"]["suspended"]
    for name in ("refused", "still", "beside"):
        said = found[name]["said"]
        assert said["status"] == 503, name
        assert "3 failed samples in a row" in said["error"]
        assert "injected: write failed" in said["error"]
    assert found["ordinary"]["reason"] == "length"
    assert found["probe"]["said"]["state"] == "committed"
    assert found["after"]["said"]["state"] == "committed"


def test_a_nan_fails_the_sample_and_says_where(seen: Callable[[str], Any]) -> None:
    found = seen("nonfinite")
    said = found["spoilt"]["said"]
    assert said["state"] == "failed"
    for part in ("'nan'", "NaN", "layer", "on_nonfinite"):
        assert part in said["error"]
    assert not found["readable"]
    assert found["healed"]["said"]["state"] == "committed"


def test_a_commit_that_hangs_is_given_up_without_a_lie(seen: Callable[[str], Any]) -> None:
    found = seen("hung_commit")
    assert found["ended"]["reason"] == "error"
    assert "known only when the store answers" in found["ended"]["said"]["error"]
    assert "may still appear" in found["again"]["said"]["error"]
    assert "is committed" in found["third"]["said"]["error"]


def test_a_store_that_does_not_answer_suspends_exporting(seen: Callable[[str], Any]) -> None:
    found = seen("hung_look")
    assert found["ended"]["said"]["status"] == 500
    assert "does not answer within 5 s" in found["ended"]["said"]["error"]
    assert found["ended"]["seconds"] < 8
    assert found["still_waiting"]
    assert found["beside"]["reason"] == "length"
    assert found["beside"]["seconds"] < 3
    assert "under way" in found["twin"]["said"]["error"]
    assert found["suspended"]["said"]["status"] == 503
    assert found["suspended"]["said"]["suspended"]
    assert "does not answer within 5 s" in found["suspended"]["said"]["error"]
    assert found["refused"]["said"]["status"] == 503
    assert "does not answer" in found["refused"]["said"]["error"]
    assert found["refused"]["seconds"] < 3
    assert found["ordinary"]["reason"] == "length"
    assert found["ordinary"]["seconds"] < 5
    assert found["after"]["said"]["state"] == "committed"


def test_a_store_that_is_slow_to_say_holds_up_only_who_asks(either: Callable[[str], Any]) -> None:
    found = either("slow_look")
    assert found["committed"]["said"]["state"] == "committed"
    assert found["beside"]["reason"] == "length"
    assert found["still_waiting"]
    free, taken = found["ends"]
    assert free["said"]["state"] == "committed"
    assert free["seconds"] >= 2
    assert taken["said"]["status"] == 400
    assert "is committed" in taken["said"]["error"]
    assert found["readable"] == ["slow-free", "slow-taken"]


def test_nothing_is_committed_for_who_went_away(either: Callable[[str], Any]) -> None:
    found = either("aborts")
    assert found["waiting"]
    assert found["ended"] == []
    assert found["committed"] == ["a-committed"]
    assert found["retry"]["said"]["state"] == "committed"


def test_preempted_requests_give_one_right_sample_each(either: Callable[[str], Any]) -> None:
    found = either("preemption")
    assert found["preempted"] >= 2
    for name, errors in found["errors"].items():
        own = errors.pop(name)
        assert own <= 2e-2
        assert own * 10 < min(errors.values()), name


def test_prefill_only_gives_the_same_rows_without_logits_or_tokens(
    either: Callable[[str], Any],
) -> None:
    found = either("prefill_only")
    assert found["logits"] == 0
    assert all(found["same"])
    for one in found["ends"]:
        assert one["said"]["state"] == "committed"
        assert one["tokens"] == []
        assert one["reason"] == "length"
    assert found["rows"] == [1, 7, 33, 130, 240]
    for kind, error in found["near"].items():
        assert error <= 2e-2, kind
    assert found["generated_as_alone"]


@pytest.mark.full
def test_several_ranks_a_stage_free_every_page(
    checkpoint: Callable[..., str], stores: Callable[[str], Path], tmp_path: Path
) -> None:
    names = ["completion", "failure", "hang", "aborts", "many"]
    found = scenarios(names, checkpoint, stores("lifecycle-tp"), tmp_path, tp=2)
    for name in names:
        whole(found[name])
    assert found["many"]["states"] == ["committed"]
