"""Stands in for ``stagetap capture`` where a prompt has an image; same arguments, same session."""

from __future__ import annotations

import argparse
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from matrix.prompts import PICTURE_KEY, one_token_an_image
from stagetap.cli.output import stdout_kept_clean
from stagetap.engine.session import CaptureSession
from stagetap.errors import Refused, StageTapError
from stagetap.options import PARAMS_KEY
from stagetap.prompts import TokenPrompt, read_prompt_file, tokenize
from stagetap.taps import parse_layer_ids
from tiny_processor import picture


def main() -> None:
    """Capture the prompts one by one; exit code and JSON as of ``stagetap capture``."""
    parser = argparse.ArgumentParser(prog="picture_arm", description=__doc__)
    for name in ("model", "prompts", "out", "layers", "run"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("pp", "tp", "in-flight", "keep-free-mib"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--engine-arg", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    path = Path(given.prompts)
    lines = tokenize(path, read_prompt_file(path), lambda: None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with stdout_kept_clean() as stdout:
            failures = _run(given, lines)
            print(json.dumps({"samples": len(lines), "failures": failures}), file=stdout)
    except Refused as error:
        sys.exit(f"stagetap: refused: {error}")
    except StageTapError as error:
        sys.exit(f"stagetap: error: {error}")
    sys.exit(bool(failures))


def _run(given: argparse.Namespace, prompts: list[TokenPrompt]) -> list[dict[str, str]]:
    options = dict(each.split("=", 1) for each in given.engine_arg)
    session = CaptureSession(
        given.model,
        layers=parse_layer_ids(given.layers),
        store=given.out,
        pp=given.pp,
        tp=given.tp,
        run_id=given.run,
        engine_args={name: json.loads(value) for name, value in options.items()},
    )
    with session:
        errors = {prompt.sample_id: _capture(session, prompt) for prompt in prompts}
    return [{"sample_id": name, "error": error} for name, error in errors.items() if error]


def _capture(session: CaptureSession, prompt: TokenPrompt) -> str | None:
    """Capture one prompt; the error, None when it was committed."""
    from vllm import SamplingParams

    given: dict[str, Any] = {"prompt_token_ids": prompt.token_ids.tolist()}
    if PICTURE_KEY in prompt.metadata:
        given["prompt_token_ids"] = one_token_an_image(given["prompt_token_ids"])
        given["multi_modal_data"] = {"image": picture(**prompt.metadata[PICTURE_KEY])}
    params = {
        "sample_id": prompt.sample_id,
        "metadata": prompt.metadata,
        "prefill_only": True,
    }
    engine = session._engine
    engine.add_request(
        uuid.uuid4().hex,
        given,
        SamplingParams(
            temperature=0.0,
            max_tokens=1,
            detokenize=False,
            extra_args={"kv_transfer_params": {PARAMS_KEY: params}},
        ),
    )
    while True:
        for output in engine.step():
            if output.finished:
                outcome = (output.kv_transfer_params or {}).get(PARAMS_KEY, {})
                committed = outcome.get("state") == "committed"
                return None if committed else str(outcome.get("error", outcome))


if __name__ == "__main__":
    main()
