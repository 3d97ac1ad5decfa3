"""Tiny random checkpoints of real architectures, made by transformers. A new model is one entry.

Random weights must not hide a mistake: every layer changes the stream by about its own size, norms
are not all ones, no bias is zero, and attention looks at few tokens and not at the mean of all.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantized import quantize_to_int8
from tiny_processor import write_processor

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

IMAGE_TOKENS = {
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
    "vision_end_token_id": 503,
}

GAIN = 1.2
"""Weights have a standard deviation of this over the square root of what they sum up."""

SPREAD = 0.2
"""How far norms, biases and other vectors are from where transformers starts them."""

EMBEDDING_STD = 0.5


@dataclass(frozen=True)
class Family:
    """How one family's checkpoint is made.

    Attributes:
        config: name of the configuration class in transformers.
        model: name of the model class.
        changes: to :data:`SIZES`.
        vision: sizes of a vision tower; the others then go to the text part.
        processor: name of the class that puts text and images together.
        in_config: what goes into config.json by hand, since transformers drops it.
        int8: whether the decoder's matrices are stored in int8.
        gain: of its weights.
    """

    config: str
    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] | None = None
    processor: str | None = None
    in_config: Mapping[str, Any] = field(default_factory=dict)
    int8: bool = False
    gain: float = GAIN

    def arguments(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """What the configuration class is given."""
        text = {**SIZES, **self.changes, **sizes}
        if self.vision is None:
            return text
        return {"text_config": text, "vision_config": dict(self.vision), **IMAGE_TOKENS}


def _family(name: str, model: str | None = None, **changes: Any) -> Family:
    return Family(f"{name}Config", model or f"{name}ForCausalLM", changes)


EXPERTS = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}

FAMILIES = {
    "llama": _family("Llama"),
    "llama-int8": Family("LlamaConfig", "LlamaForCausalLM", int8=True),
    # A layer changes the stream by a sixth, as in real models, and so passes less rounding on.
    "llama-calm": Family("LlamaConfig", "LlamaForCausalLM", gain=0.5),
    "qwen3-moe-calm": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS, gain=0.5),
    "mistral": _family("Mistral", sliding_window=64),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3"),
    "qwen3-moe": _family("Qwen3Moe", **EXPERTS),
    "glm4": _family("Glm4"),
    "granite": _family(
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "cohere": _family("Cohere"),
    "gpt-oss": _family(
        "GptOss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        intermediate_size=128,
    ),
    "gemma3": _family(
        "Gemma3Text", "Gemma3ForCausalLM", sliding_window=16, sliding_window_pattern=3
    ),
    "gemma4": _family(
        "Gemma4Text",
        "Gemma4ForCausalLM",
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        global_head_dim=64,
        hidden_size_per_layer_input=0,
    ),
    "qwen3-next": _family(
        "Qwen3Next",
        **EXPERTS,
        num_hidden_layers=8,
        shared_expert_intermediate_size=64,
        linear_key_head_dim=64,  # vLLM's kernel gives wrong numbers for 32
        linear_value_head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "head_dim": 64,  # of the rotary part
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "q_lora_rank": 64,
            # vLLM's MLA on CPU is built for these two and no others.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        in_config={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "qwen2.5-vl": Family(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
        vision={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        processor="Qwen2_5_VLProcessor",
    ),
    "qwen3-vl": Family(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [8, 4, 4],
                "mrope_interleaved": True,
            }
        },
        vision={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": 128,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "deepstack_visual_indexes": [0, 1],
            "num_position_embeddings": 64,
        },
        processor="Qwen3VLProcessor",
    ),
}


def tiny_checkpoint(family: str, folder: Path, **sizes: Any) -> Path:
    """Write a random bfloat16 checkpoint of one family to ``folder`` and return it.

    The same family and sizes give the same weights on every machine.
    """
    import torch
    import transformers

    made, seed = FAMILIES[family], zlib.crc32(family.encode())
    torch.manual_seed(seed)  # the classes draw some values themselves, such as A_log
    config = getattr(transformers, made.config)(**made.arguments(sizes))
    model = getattr(transformers, made.model)(config)
    randomize(model, seed, made.gain)
    model.to(torch.bfloat16).save_pretrained(folder)
    if made.in_config:
        path = folder / "config.json"
        document = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps(document | made.in_config, indent=2), "utf-8")
    if made.vision is not None and made.processor is not None:
        write_processor(
            folder, config.text_config.vocab_size, made.vision["patch_size"], made.processor
        )
    if made.int8:
        quantize_to_int8(folder)
    return folder


def randomize(model: Any, seed: int, gain: float) -> None:
    """Give every parameter and stored buffer of a model numbers of its own, in place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor, std in _deviations(model, gain):
            noise = torch.randn(tensor.shape, generator=generator)
            # Scales are spread about what they are. GPT-OSS leaves its biases and sinks unset.
            if tensor.ndim < 2 and name not in ("bias", "sinks"):
                tensor.add_(noise * std)
            else:
                tensor.copy_(noise * std)


def _deviations(model: Any, gain: float) -> Iterator[tuple[str, Any, float]]:
    """Every stored tensor of a model, tied ones once: its own name, and its noise's deviation."""
    from torch import nn

    seen = set()
    stored = set(model.state_dict())
    for prefix, module in model.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **module._buffers}
        for name, tensor in own.items():
            if f"{prefix}.{name}".lstrip(".") not in stored or tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            if tensor.ndim < 2:
                yield name, tensor, SPREAD
            elif isinstance(module, nn.Embedding):
                yield name, tensor, EMBEDDING_STD
            else:
                # One expert of many is a matrix; what it sums up is its last dimension at most.
                plain = tensor.ndim == 2 or not hasattr(module, "num_experts")
                yield name, tensor, gain / (tensor[0].numel() if plain else tensor.shape[-1]) ** 0.5
