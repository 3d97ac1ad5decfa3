"""What a layer id means, told by transformers: the stream before each layer, and before the norm.

A tap's value is what the *next* layer is given (after the last one: the final norm), not what a
layer returns: some models change the stream in between, as Qwen3-VL does with its image features.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FP8_CACHE = "fp8-cache"
"""Attention as by the formula, over keys and values as an fp8 KV cache holds them."""


def load_model(folder: Path, dtype: torch.dtype = torch.float32, *, fp8_cache: bool = False) -> Any:
    """The checkpoint's model in transformers, on the CPU.

    Args:
        folder: of the checkpoint.
        dtype: that it computes in.
        fp8_cache: round keys and values as vLLM's ``kv_cache_dtype="fp8"`` does (e4m3, scale 1).
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    model_class = getattr(transformers, config.architectures[0])
    # Eager attention is the formula itself, and the only form that knows sinks everywhere.
    attention = "eager"
    if fp8_cache:
        attention = FP8_CACHE
        from transformers.masking_utils import eager_mask

        transformers.AttentionInterface.register(FP8_CACHE, _attention_over_fp8)
        transformers.AttentionMaskInterface.register(FP8_CACHE, eager_mask)
    return model_class.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()


def _attention_over_fp8(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kw: Any
) -> Any:
    from transformers.models.llama.modeling_llama import eager_attention_forward

    key, value = (each.to(torch.float8_e4m3fn).to(each.dtype) for each in (key, value))
    return eager_attention_forward(module, query, key, value, *args, **kw)


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
