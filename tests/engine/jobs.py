"""What the engine tests do inside a child process: every function gets a started session."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from stagetap.engine.session import CaptureSession, EngineStopped, Prompt


def capture(
    session: CaptureSession, prompts: dict[str, list[int]], in_flight: int = 1
) -> dict[str, str | None]:
    """Capture each prompt under its name; name -> error, None when it was committed."""
    wanted = [Prompt(sample_id=name, token_ids=ids) for name, ids in prompts.items()]
    return {done.sample_id: done.error for done in session.capture(wanted, in_flight=in_flight)}


def capture_cached(session: CaptureSession, prompts: dict[str, list[int]]) -> dict[str, int]:
    """Capture each prompt, one after the other; name -> its tokens out of the prefix cache."""
    from vllm import SamplingParams

    engine = session._engine
    cached: dict[str, int] = {}
    for name, ids in prompts.items():
        params = {"stagetap": {"sample_id": name, "prefill_only": True}}
        engine.add_request(
            name,
            {"prompt_token_ids": ids},
            SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params}),
        )
        while name not in cached:
            for output in engine.step():
                assert output.kv_transfer_params["stagetap"]["state"] == "committed"
                cached[name] = output.num_cached_tokens
    return cached


def capture_with_logprobs(
    session: CaptureSession, prompts: dict[str, list[int]], top: int = 5
) -> dict[str, Any]:
    """Capture each prompt and return the engine's own log-probabilities of its tokens.

    Returns name -> for every position from 1 on ``{token id: logprob}`` of the prompt token and
    the ``top`` best.
    """
    from vllm import SamplingParams

    engine = session._engine
    found: dict[str, Any] = {}
    for name, ids in prompts.items():
        engine.add_request(
            name,
            {"prompt_token_ids": ids},
            SamplingParams(
                max_tokens=1,
                temperature=0.0,
                prompt_logprobs=top,
                extra_args={"kv_transfer_params": {"stagetap": {"sample_id": name}}},
            ),
        )
        while name not in found:
            for output in engine.step():
                assert output.kv_transfer_params["stagetap"]["state"] == "committed"
                found[name] = [
                    {str(token): entry.logprob for token, entry in position.items()}
                    for position in output.prompt_logprobs[1:]
                ]
    return found


def capture_outputs(
    session: CaptureSession, prompts: list[list[int]], cases: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Every case on every prompt with rows for output tokens, and some that stop on a token.

    Returns ``case-number`` -> tokens, finish reason, and the stop token where there is one.
    """
    from vllm import SamplingParams

    engine = session._engine
    found: dict[str, Any] = {}

    def run(name: str, ids: list[int], stopped_by: int | None = None, **sampling: Any) -> list[int]:
        transfer = {"stagetap": {"sample_id": name, "include_output": True}}
        params = SamplingParams(
            **{"temperature": 0.0, "detokenize": False, **sampling},
            extra_args={"kv_transfer_params": transfer},
        )
        engine.add_request(name, {"prompt_token_ids": ids}, params)
        while name not in found:
            for output in engine.step():
                if output.finished:
                    assert output.kv_transfer_params["stagetap"]["state"] == "committed"
                    found[name] = {
                        "tokens": list(output.outputs[0].token_ids),
                        "reason": output.outputs[0].finish_reason,
                        "stopped_by": stopped_by,
                    }
        return list(found[name]["tokens"])

    for number, ids in enumerate(prompts):
        for case, sampling in cases.items():
            run(f"{case}-{number}", ids, **sampling)
        third = found[f"eight-{number}"]["tokens"][2]
        run(f"stop-{number}", ids, third, max_tokens=8, stop_token_ids=[third])
        run(f"stop-early-{number}", ids, third, max_tokens=8, min_tokens=5, stop_token_ids=[third])
    return found


def outlive_engine(
    session: CaptureSession, prompts: dict[str, list[int]], worker: int | None
) -> dict[str, Any]:
    """Kill the engine process, or one of its workers, after the first sample.

    Returns how the capture ended, and how soon.
    """
    victim = engine_pid(session) if worker is None else worker_pid(session, worker)
    wanted = [Prompt(sample_id=name, token_ids=ids) for name, ids in prompts.items()]
    captured, killed_at = [], 0.0
    try:
        for done in session.capture(wanted, in_flight=1):
            captured.append(done.sample_id)
            if len(captured) == 1:
                killed_at = time.monotonic()
                os.kill(victim, signal.SIGKILL)
    except EngineStopped as error:
        return {
            "captured": captured,
            "error": str(error),
            "seconds": time.monotonic() - killed_at,
        }
    return {"captured": captured, "error": None, "seconds": 0.0}


def outlive_broken_invariant(session: CaptureSession, stage: int) -> dict[str, Any]:
    """Take a stage's hooks away in a running engine; how the next request ended, and how soon."""
    assert [done.error for done in session.capture([Prompt(token_ids=[5, 6, 7])])] == [None]
    session._engine.collective_rpc(remove_hooks, args=(stage,))
    started = time.monotonic()
    try:
        errors = [done.error for done in session.capture([Prompt(token_ids=[5, 6, 8])])]
    except EngineStopped as error:
        return {"ended": str(error), "seconds": time.monotonic() - started}
    return {"ended": errors, "seconds": time.monotonic() - started}


def remove_hooks(worker: Any, stage: int) -> None:
    """In a worker: as if the model had run past the hooks of its decoder layers."""
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().rank_in_group == stage:
        for module in worker.model_runner.get_model().modules():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()


def tell_pids_and_wait(session: CaptureSession, path: str) -> None:
    """Write the engine's pid to a file and wait to be killed."""
    Path(path).write_text(str(engine_pid(session)))
    time.sleep(600)


def engine_pid(session: CaptureSession) -> int:
    """The pid of the engine process of a session."""
    (process,) = session._engine.engine_core.resources.engine_manager.processes
    return process.pid


def worker_pid(session: CaptureSession, stage: int) -> int:
    """The pid of the worker of a stage, by the title that vLLM gives it."""
    (worker,) = (
        child
        for child in psutil.Process(engine_pid(session)).children(recursive=True)
        if f"Worker_PP{stage}" in "".join(child.cmdline())
    )
    return worker.pid


def generate(session: CaptureSession, prompts: list[list[int]], export: bool) -> dict[str, Any]:
    """Eight greedy tokens a prompt, what crossed each stage boundary, and what was logged."""
    from vllm import SamplingParams

    engine = session._engine
    engine.collective_rpc(record_boundary)
    outputs = []
    for number, ids in enumerate(prompts):
        extra = {"kv_transfer_params": {"stagetap": {}}} if export else None
        engine.add_request(
            str(number),
            {"prompt_token_ids": ids},
            SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, extra_args=extra),
        )
        done = []
        while not done:
            done = [output for output in engine.step() if output.finished]
        outputs.append(done[0].outputs[0].token_ids)
    return {
        "tokens": outputs,
        "boundary": engine.collective_rpc(take_boundary),
        "pages": engine.collective_rpc(tap_pages),
    }


def record_boundary(worker: Any) -> None:
    """In a worker: note the name, shape and bytes of all that goes to the next stage."""
    from vllm.distributed.parallel_state import get_pp_group

    group = get_pp_group()
    worker.boundary = []
    send = group.isend_tensor_dict

    def recording(tensors: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        worker.boundary.append(
            {name: [list(t.shape), t.numel() * t.element_size()] for name, t in tensors.items()}
        )
        return send(tensors, *args, **kwargs)

    group.isend_tensor_dict = recording


def take_boundary(worker: Any) -> list[dict[str, Any]]:
    """In a worker: what was noted."""
    return worker.boundary


def tap_pages(worker: Any) -> list[int]:
    """In a worker: in how many layers vLLM keeps its tap cache, and taps and width of a row."""
    from stagetap.engine.capture import installed_capture
    from stagetap.engine.capture.cache import TapStripe

    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    count = sum(isinstance(layer, TapStripe) for layer in layers)
    return [count, *installed_capture(worker.vllm_config).cache.pages().row]


def plain_generation(
    model: str, prompts: list[list[int]], pp: int, enforce_eager: bool = True
) -> dict[str, Any]:
    """Greedy tokens and their logprobs of an engine that does not use StageTap."""
    from stagetap.engine.environment import engine_environment

    os.environ.update(engine_environment(pp, 1))
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        pipeline_parallel_size=pp,
        distributed_executor_backend="mp",
        enforce_eager=enforce_eager,
        skip_tokenizer_init=True,
    )
    llm.llm_engine.collective_rpc(record_boundary)
    tokens, logprobs = [], []
    for ids in prompts:
        sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=3, detokenize=False)
        (output,) = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
        logprobs.append(
            [
                {str(token): entry.logprob for token, entry in position.items()}
                for position in output.outputs[0].logprobs
            ]
        )
    return {
        "package": vllm.__path__[0],
        "tokens": tokens,
        "logprobs": logprobs,
        "boundary": llm.llm_engine.collective_rpc(take_boundary),
    }


def refused_configurations(cases: list[dict[str, Any]]) -> list[str | None]:
    """Build one engine configuration per case, as the front end does; what each was refused for."""
    from stagetap.engine.environment import engine_environment

    os.environ.update(engine_environment(2, 1))
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig

    from stagetap.engine.refusal import StartRefused

    refusals: list[str | None] = []
    for case in cases:
        transfer = {
            "kv_connector": "StageTapConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": case["options"],
            **case.get("transfer", {}),
        }
        os.environ.update(case.get("environment", {}))
        try:
            EngineArgs(
                kv_transfer_config=KVTransferConfig(**transfer), **case["engine"]
            ).create_engine_config()
            refusals.append(None)
        except StartRefused as error:
            refusals.append(str(error))
        except ValueError as error:
            refusals.append("vLLM itself: " + " ".join(str(error).split()))
        finally:
            os.environ.update(engine_environment(2, 1))
            for name in case.get("environment", {}):
                os.environ[name] = "1"
    return refusals


def serve_files(folder: str, wrong: dict[str, str]) -> dict[str, Any]:
    """What vLLM's own parser and our flags make of each file for ``vllm serve --config``.

    Also the refusal of each text of ``wrong``, by its name.
    """
    from stagetap.cli.doctor_config import Expectations, check_config
    from stagetap.engine.serve_file import read_serve_file

    os.chdir(Path(folder).parents[1])  # their paths are those of the repository
    parsed = {}
    for file in sorted(Path(folder).glob("*.yaml")):
        engine = read_serve_file(file)
        transfer = engine.kv_transfer_config
        parsed[file.name] = {
            "connector": transfer.kv_connector,
            "options": transfer.kv_connector_extra_config,
            "stages": engine.pipeline_parallel_size,
            "hosts": engine.nnodes,
        }
    refused = {}
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "serve.yaml")
        for name, text in wrong.items():
            file.write_text(f"model: .cache/models/smollm2\n{text}")
            (finding,) = check_config(file, Expectations())
            refused[name] = finding.found if finding.cure else ""
    return {"parsed": parsed, "refused": refused}
