"""A tokenizer and an image processor for tiny vision checkpoints, and pictures to look at."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIAL = {
    500: "<|image_pad|>",
    501: "<|video_pad|>",
    502: "<|vision_start|>",
    503: "<|vision_end|>",
}
"""Token ids as `checkpoints.IMAGE_TOKENS` has them, and the names that processors know."""


def write_processor(folder: Path, vocab_size: int, patch_size: int, name: str) -> None:
    """Write all processor files of a vision checkpoint: one word a token, ``t5`` is token 5.

    Args:
        folder: of the checkpoint.
        vocab_size: tokens to name.
        patch_size: pixels of a patch of the vision tower.
        name: the processor's class in transformers.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from shims.still_images import StillImagesVideoProcessor

    words = {SPECIAL.get(token, f"t{token}"): token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="t0",
        pad_token="t0",
        eos_token="t2",
        additional_special_tokens=list(SPECIAL.values()),
    ).save_pretrained(folder)
    pixels = patch_size**2
    sizes = {
        "patch_size": patch_size,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": pixels * 4, "longest_edge": pixels * 64},
        "processor_class": name,
    }
    still = {"video_processor_type": StillImagesVideoProcessor.__name__, **sizes}
    image = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **sizes,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image), "utf-8")
    (folder / "video_preprocessor_config.json").write_text(json.dumps(still), "utf-8")


def picture(width: int, height: int, seed: int = 0) -> Any:
    """A PIL image of coloured noise, the same on every machine."""
    from PIL import Image

    return Image.frombytes(
        "RGB", (width, height), random.Random(seed).randbytes(width * height * 3)
    )


def image_inputs(folder: Path, token_ids: list[int], image: Any) -> Mapping[str, Any]:
    """What the model in transformers is given for a prompt with one image token and its image."""
    from transformers import AutoProcessor

    from shims import still_images

    still_images.register()
    processor = AutoProcessor.from_pretrained(folder)
    text = " ".join(processor.tokenizer.convert_ids_to_tokens(token_ids))
    inputs: Mapping[str, Any] = processor(images=[image], text=[text], return_tensors="pt")
    return inputs
