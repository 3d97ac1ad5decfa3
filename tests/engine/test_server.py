"""A real server with two stages: samples over HTTP, and failures with their cause."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.distance import relative_error
from engine.harness import server, wait_for
from stagetap import open_dataset

pytestmark = pytest.mark.engine

LAYERS = [30, 2, 15, 27]


class Served:
    """The running server, its store, and short ways to ask it."""

    def __init__(self, client: httpx.Client, store: Path):
        self.client = client
        self.store = store

    def body(self, stagetap: Any = None, **changes: Any) -> dict[str, Any]:
        """Of a completion of four tokens, with ``kv_transfer_params.stagetap`` when given."""
        body = {"model": "smollm2", "prompt": [504, 4626, 761], "max_tokens": 4, "temperature": 0}
        if stagetap is not None:
            body["kv_transfer_params"] = {"stagetap": stagetap}
        return {**body, **changes}

    def metric(self, name: str, **labels: str) -> float:
        """One of StageTap's series in ``/metrics``."""
        found = [
            sample.value
            for family in text_string_to_metric_families(self.client.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"stagetap_{name}" and labels.items() <= sample.labels.items()
        ]
        assert len(found) == 1, (name, found)
        return float(found[0])

    def complete(self, stagetap: Any = None, **changes: Any) -> httpx.Response:
        """Post :meth:`body` to ``/v1/completions``."""
        # Escaped, so that what is no valid Unicode reaches the server too.
        content = json.dumps(self.body(stagetap, **changes))
        headers = {"content-type": "application/json"}
        return self.client.post("/v1/completions", content=content, headers=headers)

    def sample(self, sample_id: str) -> Any:
        """The committed sample, verified."""
        return open_dataset(self.store, verify=True)[sample_id]

    def committed(self) -> set[str]:
        """Ids of all committed samples."""
        return set(open_dataset(self.store).sample_ids)


@pytest.fixture(scope="module")
def served(stores: Callable[[str], Path], tmp_path_factory: Any) -> Iterator[Served]:
    store = stores("server") / "dataset"
    log = tmp_path_factory.mktemp("server") / "log"
    layers = ",".join(map(str, LAYERS))
    arguments = ["smollm2", "--layers", layers, "--store", str(store), "--pp", "2"]
    with server([*arguments, "--max-len", "512"], {}, log) as running:
        yield Served(running.client, store)


def test_an_ordinary_request_exports_nothing(served: Served) -> None:
    answer = served.complete()
    assert answer.status_code == 200
    assert answer.json()["kv_transfer_params"] is None
    assert len(served.committed()) == 0


def test_a_committed_request_says_where_its_sample_is(served: Served) -> None:
    answer = served.complete({"sample_id": "a/b", "metadata": {"split": "train"}})
    assert answer.status_code == 200, answer.text
    said = answer.json()["kv_transfer_params"]["stagetap"]
    assert said["state"] == "committed"
    assert said["tokens"] == 3
    sample = served.sample("a/b")
    assert said["run_id"] == sample.manifest.run_id
    assert said["bytes"] == sum(part.byte_size for part in sample.manifest.fragments)
    assert sample.input_ids.tolist() == [504, 4626, 761]
    assert sample.layer_ids == (2, 15, 27)
    assert sample.hidden_states.shape == (3, 3, 576)
    assert sample.last_hidden_states.shape == (3, 576)
    assert sample.metadata == {"split": "train"}


def test_an_empty_object_exports_under_a_generated_name(served: Served) -> None:
    said = served.complete({}).json()["kv_transfer_params"]["stagetap"]
    assert said["sample_id"] in served.committed()


def test_export_can_be_said_no_to(served: Served) -> None:
    before = served.committed()
    answer = served.complete({"export": False})
    assert answer.status_code == 200
    assert served.committed() == before


def test_include_output_adds_a_row_for_every_token_but_the_last(served: Served) -> None:
    answer = served.complete({"sample_id": "with-output", "include_output": True})
    assert answer.status_code == 200, answer.text
    sample = served.sample("with-output")
    assert sample.manifest.token_count == 3 + 4 - 1
    assert sample.manifest.prompt_token_count == 3
    # The rows' token ids are a prefix of what the engine continues them with.
    longer = served.complete(max_tokens=1, prompt=sample.input_ids.tolist()).json()
    text = answer.json()["choices"][0]["text"]
    assert text.endswith(longer["choices"][0]["text"])


def test_an_answer_that_ends_itself_has_rows_up_to_its_end(served: Served) -> None:
    """EOS is the last output token: it was sampled and never run, so it is no row."""
    chat = [{"role": "user", "content": "Answer with one word: what is the capital of France?"}]
    body = served.body(
        {"sample_id": "eos", "include_output": True},
        messages=chat,
        max_tokens=60,
        return_token_ids=True,
    )
    del body["prompt"]
    answer = served.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    (choice,) = said["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"][-1] == 2, "SmolLM2's <|im_end|>"
    sample = served.sample("eos")
    assert sample.input_ids.tolist() == said["prompt_token_ids"] + choice["token_ids"][:-1]


def test_chat(served: Served) -> None:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Name a river."}],
        "max_tokens": 2,
        "kv_transfer_params": {"stagetap": {"sample_id": "chat"}},
    }
    answer = served.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert served.sample("chat").manifest.token_count == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("stagetap", "changes", "named"),
    [
        ({"sampel_id": "x"}, {}, "sampel_id"),
        ({"sample_id": 7}, {}, "sample_id"),
        ({"sample_id": ""}, {}, "sample_id"),
        ({"export": "yes"}, {}, "export"),
        ({"completion": "maybe"}, {}, "completion"),
        ({"include_output": True, "prefill_only": True}, {}, "prefill_only"),
        ({"prefill_only": True}, {"logprobs": 1}, "prefill_only computes no logits"),
        ({"prefill_only": True}, {"prompt_logprobs": 1}, "drop prompt_logprobs"),
        ({}, {"use_beam_search": True, "n": 2}, "beam search"),
        ({}, {"prompt": [[504, 4626], [504, 761]]}, "2 prompts in one request"),
        ({}, {"prompt": ["a", "b", "c"]}, "3 prompts in one request"),
        ({"metadata": {"text": "x" * 70_000}}, {}, "metadata"),
        ({"metadata": [1]}, {}, "metadata"),
        ([], {}, "stagetap"),
        (None, {"kv_transfer_params": {"stagetap": None}}, "stagetap is null"),
        (None, {"kv_transfer_params": {"sample_id": "x"}}, "unknown key 'sample_id'"),
        ({"sample_id": "a\ud800"}, {}, "lone surrogate"),
        ({"metadata": {"x": 10**30}}, {}, "64"),
        ({}, {"n": 2, "temperature": 1}, "n is 2"),
        ({}, {"stop": ["."]}, "stop_token_ids"),
        (None, {"structured_outputs": {"choice": ["a", "b"]}}, "structured outputs"),
    ],
)
def test_bad_options_are_answered_with_400_before_any_work(
    served: Served, stagetap: Any, changes: dict[str, Any], named: str
) -> None:
    before = served.committed()
    answer = served.complete(stagetap, **changes)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]
    assert served.committed() == before


def test_a_committed_sample_id_is_refused_at_the_door(served: Served) -> None:
    assert served.complete({"sample_id": "once"}).status_code == 200
    before = served.committed()
    answer = served.complete({"sample_id": "once"})
    assert answer.status_code == 400, answer.text
    assert "'once' is committed" in answer.json()["error"]["message"]
    assert served.committed() == before


def test_an_endpoint_that_drops_the_wish_to_export_refuses_it(served: Served) -> None:
    chat = [{"role": "user", "content": "Name a river."}]
    body = {"model": "smollm2", "messages": [chat], "kv_transfer_params": {"stagetap": {}}}
    answer = served.client.post("/v1/chat/completions/batch", json=body)
    assert answer.status_code == 400, answer.text
    assert "does not pass it on" in answer.json()["error"]["message"]
    body["messages"] = [chat, chat]
    answer = served.client.post("/v1/chat/completions/batch", json=body)
    assert "2 prompts in one request" in answer.json()["error"]["message"]


def test_beam_search_and_several_prompts_stay_as_they_are_without_export(served: Served) -> None:
    answer = served.complete(prompt=[[504, 4626], [504, 761]])
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    answer = served.complete(use_beam_search=True, n=2, max_tokens=2)
    assert answer.status_code == 200, answer.text


def test_prefill_only_answers_with_nothing_but_the_sample(served: Served) -> None:
    answer = served.complete({"sample_id": "prefill", "prefill_only": True}, stop=["."])
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert said["choices"][0]["text"] == ""
    assert said["choices"][0]["finish_reason"] == "length"
    assert said["usage"]["completion_tokens"] == 0
    assert said["kv_transfer_params"]["stagetap"]["state"] == "committed"
    assert served.sample("prefill").manifest.token_count == 3
    events = stream(served, {"sample_id": "prefill-stream", "prefill_only": True})
    assert events[-1] == "[DONE]"
    assert served.sample("prefill-stream").manifest.token_count == 3


def test_a_client_that_goes_away_leaves_no_sample(served: Served) -> None:
    before = served.metric("samples_aborted_total")
    body = served.body({"sample_id": "gone-away"}, max_tokens=400, stream=True, ignore_eos=True)
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    wait_for(lambda: served.metric("samples_aborted_total") == before + 1)
    assert served.metric("samples_under_way") == 0
    assert "gone-away" not in served.committed()
    assert served.complete({"sample_id": "gone-away"}).status_code == 200


CLIENTS = 64


def test_every_one_of_64_clients_gets_its_own_states(served: Served) -> None:
    """Half of them export; each answer is compared with the same prompt captured alone."""
    rng = random.Random(13)
    words = ["river", "stone", "cloud", "sugar", "engine", "paper", "window", "seven"]
    texts = [" ".join(rng.choices(words, k=rng.randrange(4, 30))) + f" {n}" for n in range(CLIENTS)]

    def ask(number: int) -> httpx.Response:
        wanted = {"sample_id": f"crowd-{number}"} if number % 2 == 0 else None
        if number % 4 < 2:
            return served.complete(wanted, prompt=texts[number])
        chat = [{"role": "user", "content": texts[number]}]
        body = served.body(wanted, messages=chat)
        del body["prompt"]
        return served.client.post("/v1/chat/completions", json=body)

    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(ask, range(CLIENTS)))
    for number, answer in enumerate(answers):
        assert answer.status_code == 200, answer.text
        said = answer.json()["kv_transfer_params"]
        if number % 2:
            assert said is None
        else:
            assert said["stagetap"]["sample_id"] == f"crowd-{number}"
            assert said["stagetap"]["tokens"] == answer.json()["usage"]["prompt_tokens"]
    dataset = open_dataset(served.store, verify=True)
    exported = range(0, CLIENTS, 2)
    for number in exported:
        ids = dataset[f"crowd-{number}"].input_ids.tolist()
        alone = served.complete({"sample_id": f"alone-{number}", "prefill_only": True}, prompt=ids)
        assert alone.status_code == 200, alone.text
    dataset.refresh()
    last = {  # one row a sample, its last: [H]
        kind: {n: dataset[f"{kind}-{n}"].last_hidden_states[-1] for n in exported}
        for kind in ("crowd", "alone")
    }
    for number in exported:
        crowd, alone = (dataset[f"{kind}-{number}"] for kind in ("crowd", "alone"))
        for found, expected in (
            (crowd.hidden_states, alone.hidden_states),
            (crowd.last_hidden_states, alone.last_hidden_states),
        ):
            assert relative_error(found, expected) <= 2e-2
        errors = {
            other: relative_error(last["crowd"][number], reference)
            for other, reference in last["alone"].items()
        }
        own = errors.pop(number)
        assert own * 3 < min(errors.values()), number


def test_metrics_say_what_happened(served: Served) -> None:
    committed = len(served.committed())
    assert served.complete({"sample_id": "counted"}).status_code == 200
    wait_for(lambda: served.metric("samples_under_way") == 0)
    assert served.metric("samples_committed_total") == committed + 1
    refused = served.metric("samples_refused_total")
    assert served.complete({"sample_id": "counted"}).status_code == 400
    wait_for(lambda: served.metric("samples_refused_total") == refused + 1)
    for stage in ("0", "1"):
        assert served.metric("fragments_stored_total", stage=stage) >= committed + 1
        assert served.metric("fragment_bytes_total", stage=stage) > 0
        assert served.metric("publish_seconds_count", stage=stage) >= committed + 1
        assert served.metric("slots", stage=stage) == 4
        for gauge in ("slots_in_use", "slot_waiters", "quarantined_slots", "hung_writes"):
            assert served.metric(gauge, stage=stage) == 0, gauge
    assert served.metric("breaker_state", state="closed") == 1


def test_a_stream_ends_after_the_commit(served: Served) -> None:
    events = stream(served, {"sample_id": "streamed"})
    assert events[-1] == "[DONE]"
    assert served.sample("streamed").manifest.token_count == 3
    assert len([event for event in events if "choices" in event]) >= 4


def assert_fails_alone(served: Served, sample_id: str, *named: str) -> None:
    """An exporting request fails with its cause, plain and streamed; an ordinary one does not."""
    answer = served.complete({"sample_id": sample_id})
    assert answer.status_code == 500, answer.text
    for part in (repr(sample_id), *named):
        assert part in answer.json()["error"]["message"]
    error = json.loads(stream(served, {"sample_id": f"{sample_id}-stream"})[-2])["error"]
    assert repr(f"{sample_id}-stream") in error["message"]
    assert served.complete().status_code == 200


def assert_retry_succeeds(served: Served, sample_id: str) -> None:
    assert sample_id not in served.committed()
    assert served.complete({"sample_id": sample_id}).status_code == 200
    assert served.sample(sample_id).manifest.token_count == 3


def test_a_store_that_is_gone_fails_the_request_alone(served: Served) -> None:
    away = served.store.with_name("away")
    served.store.rename(away)
    try:
        assert_fails_alone(served, "gone", "No such file or directory")
    finally:
        away.rename(served.store)
    assert_retry_succeeds(served, "gone")


def test_a_stage_that_cannot_write_fails_the_request_alone(served: Served) -> None:
    (run,) = {sample.manifest.run_id for sample in open_dataset(served.store)}
    folder = served.store / run
    away = served.store.with_name("away")
    folder.rename(away)
    folder.write_text("no directory")
    try:
        assert_fails_alone(served, "unwritable", "stage", run, "File exists")
    finally:
        folder.unlink()
        away.rename(folder)
    assert_retry_succeeds(served, "unwritable")


def stream(served: Served, stagetap: dict[str, Any]) -> list[str]:
    """The data of every event of a streamed completion."""
    body = {
        "model": "smollm2",
        "prompt": [504, 4626, 761],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "kv_transfer_params": {"stagetap": stagetap},
    }
    with served.client.stream("POST", "/v1/completions", json=body) as answer:
        lines = list(answer.iter_lines())
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert all(event == "[DONE]" or json.loads(event) for event in events)
    return events
