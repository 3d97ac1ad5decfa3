"""What a checkpoint's ``config.json`` says, so that a bad request is refused before an engine."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagetap.config_file import read_config_file
from stagetap.config_values import (
    MAX_LAYERS,
    MAX_SIZE,
    ConfigValues,
    asked_dtype,
    decoder_values,
    positions_are_scaled,
    said_dtype,
)
from stagetap.errors import Refused
from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.plan.defaults import completed
from stagetap.wording import shortened


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model; None where its configuration does not tell.

    ``max_len`` is None as well where position scaling makes it vLLM's to derive.
    """

    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    max_len: int | None = None
    dtype: str | None = None

    def row_bytes(self, layer_count: int, dtype: str | None) -> int | None:
        """Bytes that one token takes in a store, token id included.

        Raises:
            Refused: ``dtype``, as vLLM's ``--dtype``, is none that vLLM knows.
        """
        itemsize = DTYPE_ITEMSIZE.get(asked_dtype(dtype) or self.dtype or "")
        if itemsize is None or self.hidden_size is None:
            return None
        return layer_count * self.hidden_size * itemsize + 8


def model_facts(model: str) -> ModelFacts:
    """Read the facts of a checkpoint folder, or of a Hugging Face name that was downloaded.

    A name that is on this machine in no form gives no facts: the engine will look it up.

    Raises:
        Refused: a folder without a readable ``config.json``, or a value in it of the wrong type.
    """
    document = read_config(model)
    if document is None:
        return ModelFacts()
    where = f"config.json of {shortened(model, 200)}"
    outer, values = ConfigValues(document, where), decoder_values(document, where)
    outer.texts("architectures")  # for what it refuses

    def size(key: str, most: int = MAX_SIZE) -> int | None:
        return values.optional_size(key, most=most) or outer.optional_size(key, most=most)

    return ModelFacts(
        num_hidden_layers=size("num_hidden_layers", MAX_LAYERS),
        hidden_size=size("hidden_size"),
        # Gemma 3 leaves it to its class.
        vocab_size=size("vocab_size")
        or completed(document, where).decoder.optional_size("vocab_size"),
        max_len=None if positions_are_scaled(values) else size("max_position_embeddings"),
        dtype=said_dtype(values, outer),
    )


def read_config(model: str) -> dict[str, Any] | None:
    """The ``config.json`` of a checkpoint folder or a name; None where the name is not here.

    Raises:
        Refused: a folder without a readable ``config.json``.
    """
    file = find_config(model)
    return None if file is None else read_config_file(file)


def find_config(model: str) -> Path | None:
    """Where that is: in the folder, or among what was downloaded; None where the name is not here.

    Raises:
        Refused: no such folder, and no name that a model could have.
    """
    if os.path.isdir(model):
        return Path(model, "config.json")
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        try:
            from huggingface_hub import try_to_load_from_cache
            from huggingface_hub.errors import HFValidationError
        except ModuleNotFoundError:
            raise Refused(
                f"{shortened(model)} is no folder here, and huggingface_hub, which finds what was "
                "downloaded, is not installed; give a checkpoint folder, or pip install "
                "huggingface_hub"
            ) from None
        with suppress(HFValidationError):  # what is no name of theirs is none that we know
            found = try_to_load_from_cache(model, "config.json")
            return Path(found) if isinstance(found, str) else None
    raise Refused(
        f"model {shortened(model)}: no such folder; give a checkpoint folder, a Hugging Face name "
        "such as org/model, or smollm2"
    )
