"""What a checkpoint's ``config.json`` says, so that a bad request is refused before an engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagetap.config_file import read_config_file
from stagetap.errors import Refused
from stagetap.manifest import DTYPE_ITEMSIZE


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
        """Bytes that one token takes in a store, token id included."""
        chosen = self.dtype if dtype in (None, "auto") else dtype
        itemsize = DTYPE_ITEMSIZE.get(chosen or "")
        if itemsize is None or self.hidden_size is None:
            return None
        return layer_count * self.hidden_size * itemsize + 8


def model_facts(model: str) -> ModelFacts:
    """Read the facts of a checkpoint folder, or of a Hugging Face name that was downloaded.

    A name that is on this machine in no form gives no facts: the engine will look it up.

    Raises:
        Refused: a folder without a readable ``config.json``.
    """
    document = read_config(model)
    if document is None:
        return ModelFacts()
    text = document.get("text_config") or document

    def number(key: str) -> int | None:
        value = text.get(key, document.get(key))
        return value if isinstance(value, int) else None

    return ModelFacts(
        num_hidden_layers=number("num_hidden_layers"),
        hidden_size=number("hidden_size"),
        vocab_size=number("vocab_size"),
        max_len=None if _positions_are_scaled(text) else number("max_position_embeddings"),
        dtype=next(
            (
                source[key]
                for source in (text, document)
                for key in ("dtype", "torch_dtype")
                if isinstance(source.get(key), str)
            ),
            None,
        ),
    )


def read_config(model: str) -> dict[str, Any] | None:
    """The ``config.json`` of a checkpoint folder or a name; None where the name is not here.

    Raises:
        Refused: a folder without a readable ``config.json``.
    """
    file = _config_file(model)
    return None if file is None else read_config_file(file)


def _config_file(model: str) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / "config.json"
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise Refused(
            f"model {model}: no such folder; give a checkpoint folder, a Hugging Face name such "
            "as org/model, or smollm2"
        )
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(model, "config.json")
    return Path(found) if isinstance(found, str) else None


def _positions_are_scaled(config: Mapping[str, Any]) -> bool:
    for key in ("rope_scaling", "rope_parameters"):
        scaling = config.get(key) or {}
        if not isinstance(scaling, Mapping):
            return True
        if scaling.get("rope_type", scaling.get("type", "default")) != "default":
            return True
        if any(isinstance(value, Mapping) for value in scaling.values()):
            return True  # One set of parameters a kind of attention.
    return False
