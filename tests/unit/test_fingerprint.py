"""A fingerprint tells checkpoints apart without reading weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from stagetap.errors import Refused
from stagetap.fingerprint import weights_fingerprint


def checkpoint(folder: Path, shape: tuple[int, ...] = (4, 4), value: float = 0.0) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"layers": 1}')
    save_file({"w": np.full(shape, value, np.float32)}, folder / "model.safetensors")
    return folder


def test_equal_checkpoints_have_equal_fingerprints_and_weights_are_not_read(tmp_path: Path) -> None:
    one = weights_fingerprint(checkpoint(tmp_path / "a"))
    assert one == weights_fingerprint(checkpoint(tmp_path / "b", value=1.0))
    assert one.startswith("sha256:")


def grow_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"layers": 2}')


def add_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")


def rename_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "other.safetensors")


def reshape(folder: Path) -> None:
    save_file({"w": np.zeros((2, 8), np.float32)}, folder / "model.safetensors")


def lengthen(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"\0")


@pytest.mark.parametrize("change", [grow_config, add_index, rename_shard, reshape, lengthen])
def test_what_tells_checkpoints_apart(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = checkpoint(tmp_path / "a")
    before = weights_fingerprint(folder)
    change(folder)
    assert weights_fingerprint(folder) != before


def test_dummy_weights_are_told_from_real_ones(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "a")
    assert weights_fingerprint(folder, dummy_weights=True) != weights_fingerprint(folder)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no config\.json"):
        weights_fingerprint(tmp_path)
    folder = checkpoint(tmp_path / "a")
    shard = folder / "model.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:20])
    with pytest.raises(Refused, match="cut short"):
        weights_fingerprint(folder)
    shard.write_bytes(b"\xff" * 16)
    with pytest.raises(Refused, match="not a safetensors file"):
        weights_fingerprint(folder)
    shard.unlink()
    with pytest.raises(Refused, match=r"no \.safetensors file"):
        weights_fingerprint(folder)
