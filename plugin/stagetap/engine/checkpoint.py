"""Where this engine's checkpoint lies, and its fingerprint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from stagetap.errors import Refused
from stagetap.fingerprint import weights_fingerprint

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def checkpoint_fingerprint(config: VllmConfig) -> str:
    """Fingerprint of the weights that this process loads.

    Raises:
        Refused: the checkpoint is not on this machine, or is none in safetensors.
    """
    return weights_fingerprint(
        _checkpoint_folder(config), dummy_weights=config.load_config.load_format == "dummy"
    )


def fingerprint_ahead(model: str, load_format: str) -> str | None:
    """Fingerprint of a folder, before anything is loaded of it.

    None for a name: vLLM may still download it.

    Raises:
        Refused: it has no ``config.json``, or no weights in safetensors where they shall be loaded.
    """
    if not os.path.isdir(model):
        return None
    return weights_fingerprint(Path(model), dummy_weights=load_format == "dummy")


def _checkpoint_folder(config: VllmConfig) -> Path:
    model = config.model_config
    if (folder := Path(model.model)).is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                model.model,
                revision=model.revision,
                cache_dir=config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except (LocalEntryNotFoundError, ValueError):
        raise Refused(
            f"no folder of {model.model} is on this machine to take the fingerprint of; download "
            "the checkpoint and give its folder as --model"
        ) from None
