"""What a layer id means, told by transformers: the stream before each layer, and before the norm.

A tap's value is what the *next* layer is given (after the last one: the final norm), not what a
layer returns: some models change the stream in between, as Qwen3-VL does with its image features.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint's model in transformers, on the CPU."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    # Eager attention is the formula itself, and the only form that knows sinks everywhere.
    return model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def streams(model: Any, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The residual stream at every layer id of one prompt: N + 1 tensors ``[T, H]``, by id.

    Args:
        model: of :func:`load_model`.
        inputs: of one prompt, with a batch dimension of one: ``input_ids [1, T]``, and for an image
            what the model's processor gives.
    """
    decoder = model.get_decoder()
    found: dict[int, torch.Tensor] = {}

    def note(layer_id: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            found[layer_id] = hidden[0].clone()

        return hook

    modules = [*decoder.layers, decoder.norm]
    handles = [
        module.register_forward_pre_hook(note(layer_id), with_kwargs=True)
        for layer_id, module in enumerate(modules)
    ]
    try:
        with torch.no_grad():
            model(**inputs, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return [found[layer_id] for layer_id in range(len(modules))]


def text_inputs(token_ids: list[int]) -> dict[str, torch.Tensor]:
    """The inputs of a prompt of token ids."""
    return {"input_ids": torch.tensor([token_ids])}
