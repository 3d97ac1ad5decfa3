"""A model's checkpoint, what is captured of it, and the engine that captures it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from checkpoints import tiny_checkpoint
from hugging_face import text_inputs
from matrix.arms import MatrixArm, PictureArm
from matrix.prompts import picture_prompt, text_prompts
from matrix.rows import CHUNK, MODELS, REAL_MODEL, Row, layer_ids
from matrix.truth import Truth
from stagetap.models import resolve_model
from stagetap.prompts import TokenPrompt

ALWAYS = {"max_num_seqs": 4}


@dataclass(frozen=True)
class Subject:
    """One model of the table, made.

    Attributes:
        inputs: sample id -> what the model in transformers is given.
    """

    name: str
    checkpoint: Path
    architecture: str
    num_hidden_layers: int
    prompts: Sequence[TokenPrompt]
    inputs: Mapping[str, Mapping[str, Any]]

    def arm(self, row: Row) -> MatrixArm:
        """The capture of one row."""
        model = MODELS[self.name]
        engine_args = {**ALWAYS, "dtype": row.dtype, **model.engine_args, **row.engine_args}
        if model.chunked:
            engine_args["max_num_batched_tokens"] = CHUNK
        if model.picture:
            engine_args["limit_mm_per_prompt"] = {"image": 1, "video": 0}
        return (PictureArm if model.picture else MatrixArm)(
            model=str(self.checkpoint),
            layers=layer_ids(self.num_hidden_layers),
            pp=row.pp,
            tp=row.tp,
            engine_args=engine_args,
            shims=(*model.shims, *row.shims),
        )

    def truth(self, row: Row) -> Truth:
        """The Hugging Face forward of all prompts, rounded as a row's engine does."""
        dtype = getattr(torch, row.dtype)
        return Truth.of(self.checkpoint, dtype, self.inputs, fp8_cache=row.fp8_cache)


def make_subject(name: str, folder: Path) -> Subject:
    """Make a model's checkpoint in a new folder below ``folder``, and its prompts."""
    model = MODELS[name]
    if model.family == REAL_MODEL:
        checkpoint = Path(resolve_model(REAL_MODEL))
    else:
        checkpoint = tiny_checkpoint(model.family, folder / name)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    text = config.get("text_config", config)
    prompts = text_prompts(text["vocab_size"])
    inputs = {prompt.sample_id: text_inputs(prompt.token_ids.tolist()) for prompt in prompts}
    if model.picture:
        prompt, given = picture_prompt(checkpoint)
        prompts.append(prompt)
        inputs[prompt.sample_id] = dict(given)
    return Subject(
        name=name,
        checkpoint=checkpoint,
        architecture=config["architectures"][0],
        num_hidden_layers=text["num_hidden_layers"],
        prompts=prompts,
        inputs=inputs,
    )
