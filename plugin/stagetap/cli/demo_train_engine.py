"""vLLM as ``stagetap demo-train`` needs it: greedy decoding, with a draft or without one.

``python -m stagetap.cli.demo_train_engine SPEC RESULT`` decodes the prompts of a JSON file and
writes the output tokens and what vLLM counted of its drafts to another.

On a CPU Model Runner V2 samples through Triton's interpreter, 48 programs for a token of a
vocabulary of 49,152. So what runner V1 can do as well is done with that one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from stagetap.engine.environment import engine_environment

MAX_SEQUENCES = 64

_COUNTED = "vllm:spec_decode_num_"


def main(spec_file: str, result_file: str) -> None:
    """Decode, count, write."""
    spec = json.loads(Path(spec_file).read_text("utf-8"))
    if spec["runner"] == "v2":
        os.environ.update(engine_environment(1, 1))
    else:
        os.environ.update(VLLM_USE_V2_MODEL_RUNNER="0", VLLM_CPU_KVCACHE_SPACE="1")
    # One process: an engine process of its own would double the imports, a third of this job.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=spec["model"],
        dtype=spec["dtype"],
        max_model_len=spec["max_len"],
        max_num_seqs=min(len(spec["prompts"]), MAX_SEQUENCES),
        speculative_config=spec["speculative_config"],
        enforce_eager=True,
        disable_log_stats=False,
    )
    outputs = engine.generate(
        [{"prompt_token_ids": ids} for ids in spec["prompts"]],
        SamplingParams(temperature=0.0, max_tokens=spec["max_tokens"], detokenize=False),
        use_tqdm=False,
    )
    result = {
        "outputs": [list(output.outputs[0].token_ids) for output in outputs],
        "counted": _counted(engine),
    }
    Path(result_file).write_text(json.dumps(result), "utf-8")


def _counted(engine: Any) -> dict[str, Any]:
    """Counters of speculative decoding: ``drafts``, ``accepted_tokens_per_pos`` and the like."""
    return {
        metric.name.removeprefix(_COUNTED): getattr(metric, "values", None) or metric.value
        for metric in engine.get_metrics()
        if metric.name.startswith(_COUNTED)
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
