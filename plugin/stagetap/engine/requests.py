"""What happens to a request in the front end: checked before any work, and told why it failed."""

from __future__ import annotations

import os
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from stagetap.engine.configure import options_of, stands_alone, uses_stagetap
from stagetap.errors import Refused
from stagetap.options import PARAMS_KEY, RequestOptions, request_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

WHERE = f"kv_transfer_params.{PARAMS_KEY}"


class RefusedRequest(Refused, VLLMValidationError):
    """A refused request as both sides know it: HTTP 400 for vLLM, ValueError for Python callers."""

    def __init__(self, message: str):
        VLLMValidationError.__init__(self, message, parameter=WHERE)


def stagetap_params(kv_transfer_params: Any) -> Any | None:
    """The ``stagetap`` object of a request's ``kv_transfer_params``, None when there is none."""
    if not isinstance(kv_transfer_params, dict):
        return None
    return kv_transfer_params.get(PARAMS_KEY)


def _asked(config: VllmConfig, kv_transfer_params: Any) -> RequestOptions | None:
    """What a client wants of StageTap, None when nothing; no part of what it wrote is passed over.

    Raises:
        Refused: a null, which a client may mean as "export", a key that nobody here reads, or
            options that are wrong.
    """
    if not uses_stagetap(config):
        if stagetap_params(kv_transfer_params) is not None:
            raise Refused(
                f"{WHERE}: this engine captures nothing; start it with --stagetap-layers and "
                "--stagetap-store"
            )
        return None
    if not isinstance(kv_transfer_params, dict | None):
        kind = type(kv_transfer_params).__name__
        raise Refused(f"kv_transfer_params must be an object, not {kind}")
    keys = kv_transfer_params or {}
    unknown = sorted(str(key) for key in keys if key != PARAMS_KEY)
    if unknown and stands_alone(config):
        raise Refused(
            f"kv_transfer_params: unknown key {unknown[0]!r}; StageTap is this engine's only "
            f"connector and reads {PARAMS_KEY!r} alone"
        )
    if PARAMS_KEY not in keys and options_of(config).export_default == "off":
        return None
    params = keys.get(PARAMS_KEY, {})
    if params is None:
        raise Refused(f"{WHERE} is null; write {{}} to export, or leave it out")
    options = request_options(params)
    return options if options.export else None


def prepare_request(config: VllmConfig, request: EngineCoreRequest) -> None:
    """The ``request`` hook: check an exporting request and give its sample a name.

    Raises:
        RefusedRequest: HTTP 400 and ValueError, naming the field.
    """
    sampling = request.sampling_params
    extra = (sampling.extra_args if sampling is not None else None) or {}
    transfer = extra.get("kv_transfer_params")
    try:
        options = _asked(config, transfer)
        if uses_stagetap(config):
            _check_interpreter(request)
        if options is None:
            return
        _check_request(config, request, options)
    except Refused as error:
        raise RefusedRequest(str(error)) from None
    transfer = transfer or {}
    named = {**transfer.get(PARAMS_KEY, {}), "sample_id": options.sample_id or uuid.uuid4().hex}
    # A new dict: prompts of one call may share the one that the caller made.
    sampling.extra_args = {**extra, "kv_transfer_params": {**transfer, PARAMS_KEY: named}}
    if options.prefill_only:
        # The one token is never sampled, but says to every rank that none will follow.
        sampling.max_tokens, sampling.min_tokens = 1, 0


CARRIERS = ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest", "GenerateRequest")
"""The bodies whose ``kv_transfer_params`` vLLM passes on to the engine."""


def check_http_request(serving: Any, request: Any) -> None:
    """The ``http_request`` hook: refuse what an endpoint would do with an exporting request.

    Here a request is still whole; the engine sees only the prompts that it was split into.

    Raises:
        RefusedRequest: HTTP 400.
    """
    client = getattr(serving, "engine_client", None)
    if client is None:
        return
    transfer = getattr(request, "kv_transfer_params", None)
    try:
        if _asked(client.vllm_config, transfer) is None:
            return
        if getattr(request, "use_beam_search", False):
            raise Refused(f"{WHERE}: beam search runs many requests for one answer; drop one")
        if (prompts := _prompt_count(request)) > 1:
            raise Refused(
                f"{WHERE}: {prompts} prompts in one request, and one exporting request is one "
                "sample; send a request a prompt"
            )
        if stagetap_params(transfer) is not None and type(request).__name__ not in CARRIERS:
            raise Refused(
                f"{WHERE}: this endpoint does not pass it on; use /v1/completions, "
                "/v1/chat/completions, /v1/responses or /v1/messages"
            )
    except Refused as error:
        raise RefusedRequest(str(error)) from None


def _prompt_count(request: Any) -> int:
    """Prompts in the body of a completion or of a batch of chats."""
    for name in ("prompt", "prompt_embeds", "messages"):
        value = getattr(request, name, None)
        if isinstance(value, list) and value and isinstance(value[0], str | bytes | list):
            return len(value)
    return 1


def check_beam_search(config: VllmConfig) -> None:
    """The ``beam_search`` hook: ``LLM.beam_search``, whose steps are requests of their own.

    Raises:
        RefusedRequest: they would export.
    """
    if uses_stagetap(config) and options_of(config).export_default == "on":
        raise RefusedRequest(
            "beam search with export_default on would make a sample of every step of every beam; "
            "start the engine with export_default off"
        )


def _check_interpreter(request: EngineCoreRequest) -> None:
    """Refuse what would end the engine: Triton's interpreter cannot run vLLM's bitmask kernel."""
    sampling = request.sampling_params
    if (
        sampling is not None
        and sampling.structured_outputs is not None
        and os.environ.get("TRITON_INTERPRET") == "1"
    ):
        raise Refused(
            "structured outputs do not run on Model Runner V2 under TRITON_INTERPRET=1, that is "
            "on CPU; drop response_format and structured_outputs, or use a GPU"
        )


def _check_request(config: VllmConfig, request: EngineCoreRequest, options: RequestOptions) -> None:
    sampling = request.sampling_params
    if sampling is None:
        raise Refused(f"{WHERE}: a pooling request has no states to export")
    if sampling.n > 1:
        raise Refused(f"{WHERE}: n is {sampling.n}, and one exporting request is one sample; use 1")
    if options.prefill_only:
        _check_prefill_only(sampling)
    elif sampling.stop:
        raise Refused(
            f"{WHERE}: stop strings end a request outside the engine, where its sample cannot be "
            "told from an aborted one; use stop_token_ids"
        )
    if request.prompt_embeds is not None:
        raise Refused(f"{WHERE}: a prompt of embeddings has no token ids to store with its states")
    largest, vocabulary = (
        max(request.prompt_token_ids or (0,)),
        config.model_config.get_vocab_size(),
    )
    if largest >= vocabulary:
        # vLLM checks that only where it has a tokenizer, and such a step ends the engine.
        raise Refused(f"token id {largest} is outside the vocabulary of {vocabulary}")
    if request.resumable:
        raise Refused(f"{WHERE}: a streaming input has no end at which a sample is whole")


def _check_prefill_only(sampling: SamplingParams) -> None:
    """No logits are computed, so nothing can be said about them."""
    for name in ("prompt_logprobs", "logprobs", "structured_outputs"):
        if getattr(sampling, name) is not None:
            raise Refused(
                f"{WHERE}.prefill_only computes no logits and samples nothing; drop {name}, or "
                "prefill_only and set max_tokens to 1"
            )


def raise_failure(output: RequestOutput) -> None:
    """The ``final_output`` hook: a failed sample becomes an HTTP error with its cause.

    Raises:
        GracefulHTTPError: with the status that the scheduler side chose.
    """
    outcome = stagetap_params(getattr(output, "kv_transfer_params", None))
    if isinstance(outcome, dict) and outcome.get("state") == "failed":
        raise GracefulHTTPError(f"stagetap: {outcome['error']}", HTTPStatus(outcome["status"]))
