"""Rows of the table in docs/requests.md that need no engine: the front end's hooks."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.entrypoints.generate.beam_search import offline
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeCompletionRequest

from stagetap.engine.requests import (
    RefusedRequest,
    check_beam_search,
    check_http_request,
    prepare_request,
)
from stagetap.engine.workers import CapturesTaps
from stagetap.errors import Refused

pytestmark = pytest.mark.engine

CHAT = [{"role": "user", "content": "a"}]
EXPORT = {"stagetap": {}}


def config(connector: str | None = "StageTapConnector", **options: Any) -> Any:
    """A configuration as the hooks see it."""
    extra = {"layers": [1], "store": "/nowhere", **options}
    transfer = connector and KVTransferConfig(
        kv_connector=connector, kv_role="kv_producer", kv_connector_extra_config=extra
    )
    model = SimpleNamespace(get_vocab_size=lambda: 100)
    return SimpleNamespace(kv_transfer_config=transfer or None, model_config=model)


def serving(found: Any) -> Any:
    return SimpleNamespace(engine_client=SimpleNamespace(vllm_config=found))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", **{"prompt": "a", **fields})


HTTP: dict[str, tuple[Any, dict[str, Any], str | None]] = {
    "one prompt": (completion(kv_transfer_params=EXPORT), {}, None),
    "ids of one prompt": (completion(prompt=[1, 2], kv_transfer_params=EXPORT), {}, None),
    "several prompts": (completion(prompt=["a", "b"], kv_transfer_params=EXPORT), {}, "2 prompts"),
    "several id lists": (
        completion(prompt=[[1], [2], [3]], kv_transfer_params=EXPORT), {}, "3 prompts"),
    "several prompts, ordinary": (completion(prompt=["a", "b"]), {}, None),
    "several prompts, by default": (
        completion(prompt=["a", "b"]), {"export_default": "on"}, "2 prompts"),
    "several prompts, not wanted": (
        completion(prompt=["a", "b"], kv_transfer_params={"stagetap": {"export": False}}),
        {"export_default": "on"}, None),
    "beam search": (
        completion(use_beam_search=True, n=2, kv_transfer_params=EXPORT), {}, "beam search"),
    "beam search, ordinary": (completion(use_beam_search=True, n=2), {}, None),
    "beam search, by default": (
        completion(use_beam_search=True, n=2), {"export_default": "on"}, "beam search"),
    "chat": (ChatCompletionRequest(model="m", messages=CHAT, kv_transfer_params=EXPORT), {}, None),
    "batch of one chat": (
        BatchChatCompletionRequest(model="m", messages=[CHAT], kv_transfer_params=EXPORT), {},
        "does not pass it on"),
    "batch of chats": (
        BatchChatCompletionRequest(model="m", messages=[CHAT, CHAT], kv_transfer_params=EXPORT), {},
        "2 prompts"),
    "batch of chats, by default": (
        BatchChatCompletionRequest(model="m", messages=[CHAT, CHAT]), {"export_default": "on"},
        "2 prompts"),
    "tokenizing": (
        TokenizeCompletionRequest(model="m", prompt="a"), {"export_default": "on"}, None),
    "a misspelt key": (
        completion(kv_transfer_params={"stagetap": {"sampel": 1}}), {}, "unknown key 'sampel'"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HTTP))
def test_a_body_is_judged_while_it_is_whole(name: str) -> None:
    body, options, named = HTTP[name]
    if named is None:
        check_http_request(serving(config(**options)), body)
        return
    with pytest.raises(RefusedRequest) as refused:
        check_http_request(serving(config(**options)), body)
    assert named in str(refused.value)


def test_an_engine_without_capture_says_so_and_leaves_others_alone() -> None:
    check_http_request(serving(config(None)), completion(prompt=["a", "b"]))
    with pytest.raises(RefusedRequest, match="captures nothing"):
        check_http_request(serving(config(None)), completion(kv_transfer_params=EXPORT))


def test_offline_beam_search_is_refused_where_it_would_export() -> None:
    check_beam_search(config(None))
    check_beam_search(config())
    with pytest.raises(RefusedRequest, match="beam search"):
        check_beam_search(config(export_default="on"))
    # The patched vLLM asks, before its first request.
    source = inspect.getsource(offline.BeamSearchOfflineMixin.beam_search)
    calls = [
        node for node in ast.walk(ast.parse(inspect.cleandoc(source))) if isinstance(node, ast.Call)
    ]
    assert any(ast.unparse(call).startswith("run_hooks('beam_search'") for call in calls)


def engine_request(**fields: Any) -> Any:
    sampling = fields.pop("sampling", SamplingParams(extra_args={"kv_transfer_params": EXPORT}))
    return SimpleNamespace(
        sampling_params=sampling,
        **{"prompt_token_ids": [1, 2], "prompt_embeds": None, "resumable": False, **fields},
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_embeds": object(), "prompt_token_ids": None}, "embeddings"),
        ({"resumable": True}, "streaming input"),
        ({"prompt_token_ids": [1, 100]}, "token id 100 is outside the vocabulary of 100"),
    ],
)
def test_a_prompt_without_an_end_or_ids_is_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(RefusedRequest, match=named):
        prepare_request(config(), engine_request(**fields))


@pytest.mark.parametrize("smuggled", [["stagetap"], 5, "stagetap"])
def test_what_is_no_object_is_refused(smuggled: Any) -> None:
    sampling = SamplingParams(extra_args={"kv_transfer_params": smuggled})
    with pytest.raises(RefusedRequest, match="must be an object"):
        prepare_request(config(), engine_request(sampling=sampling))


def test_prefill_only_samples_nothing_whatever_was_asked() -> None:
    sampling = SamplingParams(
        max_tokens=50,
        min_tokens=7,
        stop=["."],
        extra_args={"kv_transfer_params": {"stagetap": {"prefill_only": True}}},
    )
    prepare_request(config(), engine_request(sampling=sampling))
    assert (sampling.max_tokens, sampling.min_tokens) == (1, 0)


def test_beside_other_connectors_their_keys_are_left_alone() -> None:
    part = {"kv_connector": "StageTapConnector", "kv_role": "kv_producer",
            "kv_connector_extra_config": {"layers": [1], "store": "/nowhere"}}  # fmt: skip
    found = config("MultiConnector", connectors=[part])
    params = {"other": {"x": 1}, "stagetap": {"sample_id": "s"}}
    sampling = SamplingParams(extra_args={"kv_transfer_params": params})
    prepare_request(found, engine_request(sampling=sampling))
    assert sampling.extra_args["kv_transfer_params"] == params
    with pytest.raises(RefusedRequest, match="unknown key 'other'"):
        prepare_request(
            config(),
            engine_request(sampling=SamplingParams(extra_args={"kv_transfer_params": params})),
        )


@pytest.mark.parametrize(
    "call", ["sleep", "update_weights", "reload_weights", "init_weight_transfer_engine"]
)
def test_a_worker_refuses_what_would_make_manifests_lie(call: str) -> None:
    with pytest.raises(Refused, match="StageTap"):
        getattr(CapturesTaps(), call)()
