"""What is captured: prompts of token ids, and for vision models one with an image."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints import IMAGE_TOKENS
from stagetap.prompts import TokenPrompt
from tiny_processor import image_inputs, picture

LENGTHS = (1, 7, 33, 129, 400)
PICTURE = {"width": 96, "height": 64, "seed": 5}
PICTURE_KEY = "picture"
"""The metadata that says which image a prompt has."""

_ORDINARY = 480  # From here on tiny vision models have tokens with a meaning.


def text_prompts(vocab_size: int) -> list[TokenPrompt]:
    """One prompt of random token ids a length, the same in every run."""
    numbers = random.Random(4)
    highest = min(vocab_size, _ORDINARY) if vocab_size <= 512 else vocab_size
    return [
        _prompt(number, f"length-{length}", [numbers.randrange(3, highest) for _ in range(length)])
        for number, length in enumerate(LENGTHS, start=1)
    ]


def picture_prompt(checkpoint: Path) -> tuple[TokenPrompt, Mapping[str, Any]]:
    """A prompt with an image, as many image tokens in it as the image makes, and its HF inputs."""
    start, image, end = (
        IMAGE_TOKENS[name]
        for name in ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    )
    words = [random.Random(4).randrange(3, _ORDINARY) for _ in range(24)]
    short = [*words[:8], start, image, end, *words[8:]]
    inputs = image_inputs(checkpoint, short, picture(**PICTURE))
    expanded = inputs["input_ids"][0].tolist()
    return _prompt(len(LENGTHS) + 1, "picture", expanded, {PICTURE_KEY: PICTURE}), inputs


def one_token_an_image(token_ids: Sequence[int]) -> list[int]:
    """The prompt as an engine wants it: it puts in the image's other tokens itself."""
    image = IMAGE_TOKENS["image_token_id"]
    return [
        token
        for index, token in enumerate(token_ids)
        if token != image or index == 0 or token_ids[index - 1] != image
    ]


def _prompt(
    number: int, name: str, ids: list[int], metadata: dict[str, Any] | None = None
) -> TokenPrompt:
    return TokenPrompt(number, name, np.asarray(ids, dtype=np.int32), metadata or {})
