"""Checkpoints that go by a short name."""

from __future__ import annotations

import os
from pathlib import Path

from stagetap.errors import Refused

# Made by set-up; see the module of the same name.
NAMED = ("smollm2",)


def models_folder() -> Path:
    """Where named checkpoints are: in the checkout, else in the user's cache."""
    root = Path(__file__).resolve().parents[3]
    if (root / "pyproject.toml").is_file():
        return root / ".cache" / "models"
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "stagetap" / "models"


def resolve_model(name: str) -> str:
    """The folder of a named checkpoint; any other name or path is returned as it is.

    Raises Refused when the named checkpoint has not been made.
    """
    if name not in NAMED:
        return name
    folder = models_folder() / name
    if not folder.is_dir():
        raise Refused(f"the checkpoint {name} is not at {folder}; run `./justw setup` to make it")
    return str(folder)
