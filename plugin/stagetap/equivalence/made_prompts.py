"""Prompts of given lengths, the same on every machine and in every run."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from stagetap.errors import Refused
from stagetap.prompts import TokenPrompt

DEFAULT_LENGTHS = (1, 7, 33, 129, 400)
SEED = 20


def prompts_of_lengths(lengths: Sequence[int], vocab_size: int) -> list[TokenPrompt]:
    """One prompt of random token ids for each length. Raises Refused for a length below 1."""
    prompts = []
    for number, length in enumerate(lengths, start=1):
        if length < 1:
            raise Refused(f"lengths: {length} is no length of a prompt; give numbers from 1 up")
        # One generator a prompt: a list of other lengths leaves this prompt as it is.
        numbers = random.Random(SEED * 1_000_003 + length)
        ids = [numbers.randrange(vocab_size) for _ in range(length)]
        repeat = list(lengths[: number - 1]).count(length)
        sample_id = f"length-{length}" + (f"-{repeat + 1}" if repeat else "")
        prompts.append(TokenPrompt(number, sample_id, np.asarray(ids, dtype=np.int32), {}))
    return prompts


def parse_lengths(text: str) -> list[int]:
    """Read ``1,7,33``. Raises Refused for anything but integers between commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise Refused(
            f"lengths {text!r}: write numbers of tokens between commas, such as 1,7,33"
        ) from None
