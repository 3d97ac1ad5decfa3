"""The recipe of ``configs/recipes``, filled in, and what it says with some of it changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "configs/recipes/kimi_k3_pp2.yaml"
DRAFT = ROOT / "configs/drafts/kimi_k3_dspark_mla.json"
TARGET = ROOT / "configs/targets/kimi-k3"

ENGINE_NODES = [["10.0.0.1", "10.0.0.2"], ["10.0.0.3", "10.0.0.4"]]
TRAINER_NODES = ["10.0.0.5", "10.0.0.6", "10.0.0.7", "10.0.0.8"]


def as_shipped() -> dict[str, Any]:
    """The document, with what it leaves open."""
    return yaml.safe_load(RECIPE.read_text("utf-8"))


def filled() -> dict[str, Any]:
    """The same with every open value filled in."""
    document = as_shipped()
    document |= {"target": str(TARGET), "draft": str(DRAFT)}
    document["engines"]["nodes"] = [list(nodes) for nodes in ENGINE_NODES]
    document["trainer"] |= {
        "nodes": list(TRAINER_NODES),
        "rows": "/data/rows",
        "prompts": "/p.jsonl",
    }
    document["trainer"]["save-path"] = "/data/draft"
    return document


def changed(**changes: Any) -> dict[str, Any]:
    """The filled one; ``engines__pp=4`` sets ``engines: pp``.

    ``_`` stands for ``-``, but not inside of ``options``, whose names are the store's own.
    """
    document = filled()
    for place, value in changes.items():
        *sections, key = place.split("__")
        section = document
        for name in sections:
            section = section[name]
        section[key if sections[1:] else key.replace("_", "-")] = value
    return document


def written(folder: Path, document: Any) -> Path:
    """A file of it."""
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    return file
