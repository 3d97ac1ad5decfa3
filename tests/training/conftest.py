"""A tiny target, and a dataset of it written by the product's own writers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from checkpoints import tiny_checkpoint
from stagetap.fingerprint import weights_fingerprint
from stagetap.taps import ID_CONVENTION
from store_samples import HIDDEN, LAYERS, Engine, tapped
from tmpfs import mount_tmpfs as mount_tmpfs

PROMPT_TOKENS = 5
"""Of every sample; what comes behind them counts as output."""


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        "llama",
        tmp_path_factory.mktemp("target"),
        hidden_size=HIDDEN,
        intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )


Export = Callable[[str, int, int], None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def export(store: Path, target: Path) -> Iterator[Export]:
    """Sample id, tokens and seed -> that sample, committed: taps 2, 0, 4, 6 over two stages."""
    fingerprint = weights_fingerprint(target)
    what = tapped(weights_fingerprint=fingerprint, id_convention=ID_CONVENTION)
    engine = Engine(store, what)

    def run(sample_id: str, tokens: int, seed: int) -> None:
        made = engine.publish(engine.ref(sample_id), tokens, seed)
        engine.committer.commit(msgspec.structs.replace(made, prompt_token_count=PROMPT_TOKENS))

    yield run
    engine.close()
