"""An engine for offline capture: prompts in, committed samples out."""

from __future__ import annotations

import os
import sys
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from stagetap.engine.environment import READ_AT_IMPORT, engine_environment, is_cpu_build
from stagetap.engine.refusal import StartRefused
from stagetap.engine.report import EngineReport, engine_report
from stagetap.engine.series import check_series
from stagetap.engine.vllm_errors import said_by_vllm
from stagetap.errors import Refused, StageTapError
from stagetap.options import PARAMS_KEY
from stagetap.wording import one_line

CLOSE_SECONDS = 30.0
"""How long an engine may take to end before it is killed; vLLM's own default is not to wait."""

DEATH_POLL_SECONDS = 0.5

_WORDLESS = "its process ended without a word, as one that is killed does (out of memory?)"


@dataclass(frozen=True)
class Prompt:
    """One sample to capture; an absent ``sample_id`` is generated."""

    token_ids: list[int]
    sample_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Captured:
    """How one prompt ended: committed, or failed with ``error``.

    ``suspended``: it was not run, since exporting was suspended.
    """

    sample_id: str
    tokens: int
    bytes: int
    error: str | None
    suspended: bool = False


class EngineStopped(StageTapError):
    """The engine has died; the message is the cause, as far as one of its processes told."""


class CaptureSession:
    """Starts vLLM with the StageTap connector, and stops it on ``close``.

    Args:
        model: a checkpoint folder.
        layers: asked layer ids, in the order in which the reader shall give them back, or a choice
            as :mod:`stagetap.layer_choice` has them.
        store: where samples go.
        pp: pipeline stages.
        tp: tensor-parallel ranks of each stage.
        max_len: longest sequence, in tokens; the model's own limit when absent.
        run_id: name of the run; generated when absent.
        include_output: greedy output tokens to generate and to keep rows for; 0 keeps the prompt.
        connector_options: further :class:`stagetap.options.ConnectorOptions`.
        engine_args: further arguments of vLLM's ``EngineArgs``.

    Raises:
        Refused: the engine cannot do what was asked.
        StageTapError: it did not start for another reason of ours, such as a store out of reach.
    """

    def __init__(
        self,
        model: str,
        *,
        layers: str | Sequence[int],
        store: str,
        pp: int = 1,
        tp: int = 1,
        max_len: int | None = None,
        run_id: str | None = None,
        include_output: int = 0,
        connector_options: dict[str, Any] | None = None,
        engine_args: dict[str, Any] | None = None,
    ):
        check_series()
        environment = engine_environment(pp, tp)
        late = [name for name in READ_AT_IMPORT if environment.get(name) != os.environ.get(name)]
        if late and "vllm" in sys.modules:
            raise Refused(
                f"vLLM was imported before {late[0]}={environment[late[0]]} was set; create the "
                "session before anything imports vLLM, or set the variable yourself"
            )
        os.environ.update(environment)
        self._include_output = include_output
        options = {**(connector_options or {}), **({"run_id": run_id} if run_id else {})}
        arguments = engine_arguments(
            model, pp, tp, {"max_model_len": max_len, **(engine_args or {})}
        )
        with ExitStack() as resources:
            self._report = resources.enter_context(engine_report())
            with starting(self._report):
                self._engine = _start(arguments, layers, store, options)
            self._resources = resources.pop_all()
        self._closing = threading.Event()
        threading.Thread(target=self._watch_engine, name="stagetap-watch", daemon=True).start()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as vLLM loaded it."""
        return self._engine.get_tokenizer()

    def capture(self, prompts: Iterable[Prompt], in_flight: int = 16) -> Iterator[Captured]:
        """Capture prompts and yield each as it ends, in the order in which they end.

        Args:
            prompts: taken one by one, as room comes free.
            in_flight: prompts in the engine at a time; 1 makes every batch one prompt.

        Closing the iterator aborts what is in flight; what was yielded stays.

        Raises:
            Refused: a prompt that the engine's door refuses, such as one that is too long.
            EngineStopped: the engine has died, of what the message says.
        """
        waiting = iter(prompts)
        running: dict[str, Prompt] = {}
        try:
            exhausted = False
            while running or not exhausted:
                while not exhausted and len(running) < in_flight:
                    prompt = next(waiting, None)
                    if prompt is None:
                        exhausted = True
                    else:
                        running[self._add(prompt)] = prompt
                for output in self._step() if running else ():
                    if output.finished:
                        del running[output.request_id]
                        yield _captured(output)
        finally:
            if running:
                self._engine.abort_request(list(running))

    def _step(self) -> list[Any]:
        """Outputs of requests that have gone on. Raises EngineStopped."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            outputs: list[Any] = self._engine.step()
        except EngineDeadError as error:
            raise EngineStopped(self._report.cause() or _WORDLESS) from error
        return outputs

    def _watch_engine(self) -> None:
        """Wake ``step`` when the engine has died.

        vLLM's synchronous client notes the death of its engine process, but goes on waiting for an
        output of it.
        """
        client = self._engine.engine_core
        resources = getattr(client, "resources", None)
        while resources is not None and not self._closing.wait(DEATH_POLL_SECONDS):
            if resources.engine_dead:
                from vllm.v1.engine.exceptions import EngineDeadError

                client.outputs_queue.put(EngineDeadError())
                return

    def _add(self, prompt: Prompt) -> str:
        from vllm import SamplingParams

        params: dict[str, Any] = {"metadata": prompt.metadata}
        if prompt.sample_id is not None:
            params["sample_id"] = prompt.sample_id
        params["include_output" if self._include_output else "prefill_only"] = True
        request_id = uuid.uuid4().hex
        self._engine.add_request(
            request_id,
            {"prompt_token_ids": prompt.token_ids},
            SamplingParams(
                temperature=0.0,
                max_tokens=self._include_output or 1,
                detokenize=False,
                extra_args={"kv_transfer_params": {PARAMS_KEY: params}},
            ),
        )
        return request_id

    def close(self) -> None:
        """Stop the engine, which gets :data:`CLOSE_SECONDS` to let go of its store."""
        self._closing.set()
        with self._resources:
            self._engine.engine_core.shutdown(timeout=CLOSE_SECONDS)

    def __enter__(self) -> CaptureSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def engine_arguments(model: str, pp: int, tp: int, further: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of vLLM's ``EngineArgs`` for so many stages and ranks; ``further`` ones win."""
    arguments = {
        "model": model,
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "enforce_eager": True,
    }
    if is_cpu_build() and pp * tp > 1:
        arguments["distributed_executor_backend"] = "mp"
    return {**arguments, **further}


@contextmanager
def starting(report: EngineReport) -> Iterator[None]:
    """While an engine starts: why it does not is raised here, in one line.

    Raises:
        Refused: a process has refused, or vLLM does not take its arguments.
        StageTapError: vLLM did not start for another reason.
    """
    try:
        yield
    except StartRefused as error:
        raise Refused(str(error)) from None
    except Exception as error:
        if (refusal := report.refusal()) is not None:
            raise Refused(refusal) from None
        raise _start_failure(error, report.cause()) from error
    report.forget()


def _start(
    arguments: dict[str, Any], layers: str | Sequence[int], store: str, options: dict[str, Any]
) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from stagetap.engine.flags import kv_transfer_config

    transfer = kv_transfer_config(layers, store, **options)
    return LLMEngine.from_engine_args(EngineArgs(**arguments, kv_transfer_config=transfer))


def _start_failure(error: Exception, cause: str | None) -> StageTapError:
    """What vLLM itself says against its arguments, in one line, or that it failed at its start."""
    if isinstance(error, (TypeError, ValueError)):  # pydantic's are ValueErrors
        logged = f" ({cause})" if cause else ""
        return Refused(f"vLLM refuses these arguments: {said_by_vllm(error)}{logged}")
    return StageTapError(
        f"vLLM did not start: {cause or one_line(error)}; its own log is above, "
        "VLLM_LOGGING_LEVEL=INFO says more"
    )


def _captured(output: Any) -> Captured:
    outcome = (output.kv_transfer_params or {}).get(PARAMS_KEY, {})
    error = None if outcome.get("state") == "committed" else outcome.get("error")
    if error is None and outcome.get("state") != "committed":
        error = f"the request ended as {output.outputs[0].finish_reason!r} without a commit"
    return Captured(
        sample_id=outcome.get("sample_id", ""),
        tokens=outcome.get("tokens", 0),
        bytes=outcome.get("bytes", 0),
        error=error,
        suspended=outcome.get("suspended", False),
    )
