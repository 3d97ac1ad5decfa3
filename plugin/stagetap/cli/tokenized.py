"""A prompt file as token ids, with the tokenizer of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stagetap.errors import Refused
from stagetap.prompts import TokenPrompt, read_prompt_file, tokenize


def load_prompts(prompt_file: Path, model: str) -> list[TokenPrompt]:
    """The prompts of a file as token ids, with the tokenizer of ``model`` if a line needs it.

    Raises:
        Refused: a bad line, by number, or a model whose tokenizer cannot be loaded.
    """

    def load_tokenizer() -> Any:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(model)
        except (OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise Refused(
                f"the tokenizer of {model} cannot be loaded ({reason}); write the prompts as "
                "prompt_token_ids"
            ) from None
        if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
            # transformers makes one up from config.json, which turns text into nothing, or worse
            # into tokens that mean "unknown".
            raise Refused(
                f"{model} has no tokenizer; fetch its tokenizer files, or write the prompts as "
                "prompt_token_ids"
            )
        return tokenizer

    return tokenize(prompt_file, read_prompt_file(prompt_file), load_tokenizer)
