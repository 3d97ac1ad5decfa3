"""What happens to a request in the front end: checked before any work, and told why it failed."""

from __future__ import annotations

import os
import uuid
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GracefulHTTPError, VLLMValidationError

from stagetap.engine.configure import options_of, uses_stagetap
from stagetap.errors import Refused
from stagetap.options import PARAMS_KEY, RequestOptions, request_options

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput
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


def _asked_params(kv_transfer_params: Any) -> Any | None:
    """As :func:`stagetap_params`, for what a client wrote: nothing of it is passed over.

    Raises:
        Refused: a null, which a client may mean as "export", or a key that nobody here reads.
    """
    if not kv_transfer_params:
        return None
    unknown = sorted(str(key) for key in kv_transfer_params if key != PARAMS_KEY)
    if unknown:
        raise Refused(
            f"kv_transfer_params: unknown key {unknown[0]!r}; StageTap is this engine's only "
            f"connector and reads {PARAMS_KEY!r} alone"
        )
    if kv_transfer_params[PARAMS_KEY] is None:
        raise Refused(f"{WHERE} is null; write {{}} to export, or leave it out")
    return kv_transfer_params[PARAMS_KEY]


def prepare_request(config: VllmConfig, request: EngineCoreRequest) -> None:
    """The ``request`` hook: check an exporting request and give its sample a name.

    Raises:
        RefusedRequest: HTTP 400 and ValueError, naming the field.
    """
    sampling = request.sampling_params
    extra = (sampling.extra_args if sampling is not None else None) or {}
    transfer = extra.get("kv_transfer_params")
    try:
        if not uses_stagetap(config):
            if stagetap_params(transfer) is not None:
                raise Refused(
                    f"{WHERE}: this engine captures nothing; start it with --stagetap-layers and "
                    "--stagetap-store"
                )
            return
        _check_interpreter(request)
        params = _asked_params(transfer)
        if params is None and options_of(config).export_default == "off":
            return
        options = request_options({} if params is None else params)
        if not options.export:
            return
        _check_request(request, options)
    except Refused as error:
        raise RefusedRequest(str(error)) from None
    named = {**(params or {}), "sample_id": options.sample_id or uuid.uuid4().hex}
    # A new dict: prompts of one call may share the one that the caller made.
    sampling.extra_args = {**extra, "kv_transfer_params": {PARAMS_KEY: named}}


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


def _check_request(request: EngineCoreRequest, options: RequestOptions) -> None:
    sampling = request.sampling_params
    if sampling is None:
        raise Refused(f"{WHERE}: a pooling request has no states to export")
    if sampling.n > 1:
        raise Refused(f"{WHERE}: n is {sampling.n}, and one exporting request is one sample; use 1")
    if sampling.stop:
        raise Refused(
            f"{WHERE}: stop strings end a request outside the engine, where its sample cannot be "
            "told from an aborted one; use stop_token_ids"
        )
    if request.prompt_embeds is not None:
        raise Refused(f"{WHERE}: a prompt of embeddings has no token ids to store with its states")
    if request.resumable:
        raise Refused(f"{WHERE}: a streaming input has no end at which a sample is whole")


def raise_failure(output: RequestOutput) -> None:
    """The ``final_output`` hook: a failed sample becomes an HTTP error with its cause.

    Raises:
        GracefulHTTPError: with the status that the scheduler side chose.
    """
    outcome = stagetap_params(getattr(output, "kv_transfer_params", None))
    if isinstance(outcome, dict) and outcome.get("state") == "failed":
        raise GracefulHTTPError(f"stagetap: {outcome['error']}", HTTPStatus(outcome["status"]))
