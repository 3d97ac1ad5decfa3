"""Weights in int8, as compressed-tensors writes them: one scale a row, activations as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ROWS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "dynamic": False,
    "strategy": "channel",
}
_TOKENS = {**_ROWS, "dynamic": True, "strategy": "token"}

QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": _ROWS, "input_activations": _TOKENS}
    },
}


def quantize_to_int8(folder: Path) -> None:
    """Turn the decoder's matrices of a checkpoint folder into int8 with scales, in place."""
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()  # [out, in]
        scale = (weight.abs().amax(dim=1, keepdim=True) / 127).to(torch.bfloat16)  # [out, 1]
        tensors[name] = (weight / scale.float()).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    config = folder / "config.json"
    document = json.loads(config.read_text("utf-8")) | {"quantization_config": QUANTIZATION}
    config.write_text(json.dumps(document, indent=2), "utf-8")
