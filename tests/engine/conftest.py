"""Checkpoints and single-stage references, made once and shared by all engine tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import tiny_checkpoint
from engine.harness import Arm, store_folder
from stagetap import open_dataset
from stagetap.models import resolve_model

LENGTHS = (1, 7, 33, 129, 400)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A function from a family's name (and sizes) to its checkpoint folder."""
    made: dict[Any, str] = {}

    def make(family: str, **sizes: Any) -> str:
        if family == "smollm2":
            return str(resolve_model(family))
        key = (family, tuple(sorted(sizes.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = str(tiny_checkpoint(family, folder, **sizes))
        return made[key]

    return make


@pytest.fixture(scope="session")
def stores() -> Iterator[Callable[[str], Path]]:
    """A function that makes a fresh folder for a store, removed at the end."""
    folders: list[Path] = []

    def make(name: str) -> Path:
        folders.append(store_folder(name))
        return folders[-1]

    yield make
    for folder in folders:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def captured(stores: Callable[[str], Path], checkpoint: Callable[..., str]) -> Callable[..., Any]:
    """A function that captures prompts in an engine of its own, once per set of arguments."""
    done: dict[str, Any] = {}

    def run(
        family: str,
        prompts: dict[str, list[int]],
        layers: list[int],
        pp: int,
        in_flight: int = 1,
        partition: str | None = None,
        tp: int = 1,
        connector: dict[str, Any] | None = None,
        **engine_args: Any,
    ) -> Any:
        key = repr((family, prompts, layers, pp, in_flight, partition, tp, connector, engine_args))
        if key not in done:
            store = stores(f"{family}-pp{pp}")
            arm = Arm(
                "engine.jobs:capture",
                {
                    "model": checkpoint(family),
                    "layers": layers,
                    "store": str(store),
                    "pp": pp,
                    "tp": tp,
                    "connector_options": connector,
                    "engine_args": {"skip_tokenizer_init": True, **engine_args},
                },
                {"prompts": prompts, "in_flight": in_flight},
                {
                    **({"VLLM_PP_LAYER_PARTITION": partition} if partition else {}),
                    # One stage needs no second process, which halves the time of its start.
                    **({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if pp * tp == 1 else {}),
                },
            )
            errors = arm.run()
            assert errors == dict.fromkeys(prompts), f"not committed: {errors}"
            done[key] = open_dataset(store, verify=True)
        return done[key]

    return run
