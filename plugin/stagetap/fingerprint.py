"""Which weights a checkpoint holds, told without reading them."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

from stagetap.errors import Refused

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Upper bound of a safetensors header, as the format's own reader has it."""


def weights_fingerprint(checkpoint: Path, dummy_weights: bool = False) -> str:
    """Digest of a checkpoint folder: ``sha256:<hex>``.

    Covers ``config.json``, the safetensors index when there is one, and of every shard its name,
    size and header (names, dtypes, shapes and offsets of its tensors); never the weights.

    Args:
        checkpoint: a folder in Hugging Face layout.
        dummy_weights: the engine makes random weights up; only the configuration counts.

    Raises:
        Refused: no ``config.json``, no safetensors shard, or a shard cut short.
    """
    config = checkpoint / "config.json"
    if not config.is_file():
        raise Refused(f"{checkpoint} has no config.json; give a checkpoint in Hugging Face layout")
    digest = hashlib.sha256()
    _add(digest, "config.json", config.read_bytes())
    if dummy_weights:
        _add(digest, "weights", b"dummy")
        return f"sha256:{digest.hexdigest()}"
    shards = sorted(checkpoint.glob("*.safetensors"))
    if not shards:
        raise Refused(
            f"{checkpoint} has no .safetensors file; convert the checkpoint to safetensors"
        )
    for index in sorted(checkpoint.glob("*.safetensors.index.json")):
        _add(digest, index.name, index.read_bytes())
    for shard in shards:
        _add(digest, f"{shard.name}:{shard.stat().st_size}", _header(shard))
    return f"sha256:{digest.hexdigest()}"


def _add(digest: hashlib._Hash, name: str, content: bytes) -> None:
    # Lengths keep the parts apart, so that no two sets of files read the same.
    digest.update(struct.pack("<QQ", len(name.encode()), len(content)))
    digest.update(name.encode())
    digest.update(content)


def _header(shard: Path) -> bytes:
    with shard.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            raise Refused(f"{shard} is not a safetensors file; fetch the checkpoint again")
        header = file.read(length)
    if len(header) != length:
        raise Refused(f"{shard} is cut short; fetch the checkpoint again")
    return header
