"""Prompt files: JSON lines in, checked token ids out.

Imports neither torch, transformers nor vLLM: everything that can be wrong with a prompt file is
said before an engine starts, by line number. The tokenizer is the caller's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stagetap import keys
from stagetap.errors import Refused
from stagetap.manifest import check_metadata
from stagetap.options import MAX_SAMPLE_ID_CHARS

Kind = Literal["text", "prompt_token_ids", "messages"]
KINDS: tuple[Kind, ...] = ("text", "prompt_token_ids", "messages")
KEYS = (*KINDS, "id", "metadata")

TOKENIZE_TOGETHER = 1024
MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True)
class PromptLine:
    """One checked line of a prompt file; ``number`` counts from 1."""

    number: int
    sample_id: str
    kind: Kind
    content: Any
    metadata: dict[str, Any]


@dataclass(frozen=True)
class TokenPrompt:
    """One prompt ready for an engine; ``token_ids`` is int32 ``[T]``."""

    number: int
    sample_id: str
    token_ids: np.ndarray
    metadata: dict[str, Any]


def read_prompt_file(path: Path) -> list[PromptLine]:
    """Read and check a whole prompt file. Blank lines are passed over.

    A line without ``id`` gets one derived from its content, so that the same file names the same
    samples on every run, whatever is put before or after the line.

    Raises:
        Refused: the file cannot be read, holds no prompt, or a line is bad: the first, by number.
    """
    try:
        raw_lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise Refused(f"{path}: {error.strerror}; give a readable JSONL file") from None
    lines: list[PromptLine] = []
    numbers: dict[str, int] = {}  # sample id -> line
    repeats: dict[str, int] = {}  # derived id -> how often it came
    for number, raw in enumerate(raw_lines, start=1):
        if not raw.strip():
            continue
        try:
            line = _read_line(number, raw, repeats)
            if line.sample_id in numbers:
                raise Refused(
                    f"id {line.sample_id!r} is that of line {numbers[line.sample_id]} already; "
                    "give every prompt its own id"
                )
        except Refused as error:
            raise Refused(f"{path}, line {number}: {error}") from None
        numbers[line.sample_id] = number
        lines.append(line)
    if not lines:
        raise Refused(f'{path} holds no prompt; write one JSON object a line, as {{"text": "..."}}')
    return lines


def tokenize(
    path: Path, lines: Sequence[PromptLine], load_tokenizer: Callable[[], Any]
) -> list[TokenPrompt]:
    """Turn every line into token ids, as vLLM would.

    Args:
        path: named in messages.
        lines: of :func:`read_prompt_file`.
        load_tokenizer: called at most once, and only when a line needs it; gives a transformers
            tokenizer.

    Raises:
        Refused: a line that the tokenizer or its chat template cannot take, by number.
    """
    token_ids = {line.number: line.content for line in lines if line.kind == "prompt_token_ids"}
    written = [line for line in lines if line.kind != "prompt_token_ids"]
    if written:
        tokenizer = load_tokenizer()
        for start in range(0, len(written), TOKENIZE_TOGETHER):
            part = written[start : start + TOKENIZE_TOGETHER]
            token_ids.update(_tokenize_part(path, part, tokenizer))
    prompts = []
    for line in lines:
        if not len(token_ids[line.number]):
            raise Refused(f"{path}, line {line.number}: the prompt has no tokens; write some text")
        prompts.append(
            TokenPrompt(
                number=line.number,
                sample_id=line.sample_id,
                token_ids=np.asarray(token_ids[line.number], dtype=np.int32),
                metadata=line.metadata,
            )
        )
    return prompts


def check_token_ids(path: Path, prompts: Sequence[TokenPrompt], vocab_size: int) -> None:
    """Raise Refused for the first prompt with a token id outside the vocabulary, by line."""
    for prompt in prompts:
        highest = int(prompt.token_ids.max())
        if highest >= vocab_size:
            raise Refused(
                f"{path}, line {prompt.number}: token id {highest} is outside the vocabulary of "
                f"{vocab_size}; tokenize with the tokenizer of this model"
            )


def check_lengths(
    path: Path, prompts: Sequence[TokenPrompt], max_len: int, include_output: int
) -> None:
    """Raise Refused for prompts that do not fit ``max_len`` tokens, naming their lines.

    The engine always makes one token of output, so a prompt must leave room for
    ``max(1, include_output)``.
    """
    output = max(1, include_output)
    needed = f"{output} of output" if include_output else "the one that the engine makes of each"
    too_long = [prompt for prompt in prompts if len(prompt.token_ids) + output > max_len]
    if too_long:
        first = too_long[0]
        others = [str(prompt.number) for prompt in too_long[1:6]]
        more = f" (and lines {', '.join(others)}{', ...' if len(too_long) > 6 else ''})"
        raise Refused(
            f"{path}, line {first.number}{more if others else ''}: {len(first.token_ids)} tokens "
            f"and {needed} exceed the longest sequence of {max_len} tokens; shorten the "
            "prompt, or raise --max-len where the model allows it"
        )


def _read_line(number: int, raw: bytes, repeats: dict[str, int]) -> PromptLine:
    entry = _parse(raw)
    for key in entry:
        if key not in KEYS:
            raise Refused(f"unknown key {key!r}; known are {', '.join(KEYS)}")
    given = [kind for kind in KINDS if kind in entry]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        raise Refused(f"exactly one of {', '.join(KINDS)} is needed, found {found}")
    kind = given[0]
    content = _CHECKS[kind](entry[kind])
    metadata = entry.get("metadata", {})
    check_metadata(metadata)
    sample_id = _checked_id(entry["id"]) if "id" in entry else _derived_id(entry, repeats)
    return PromptLine(number, sample_id, kind, content, metadata)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique_keys, parse_constant=_no_constant
        )
    except UnicodeDecodeError as error:
        raise Refused(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise Refused(
            f"not JSON: {error.msg} at column {error.colno}; write one JSON object a line"
        ) from None
    except RecursionError:
        raise Refused("nested too deeply; write one flat JSON object a line") from None
    if not isinstance(entry, dict):
        raise Refused(
            f'a JSON object is needed, not {_json_type(entry)}; write it as {{"text": "..."}}'
        )
    return entry


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise Refused(f"key {repeated!r} is there twice; keep one of them")
    return found


def _no_constant(name: str) -> Any:
    raise Refused(f"{name} is not JSON; write a number or null")


def _checked_text(text: Any) -> str:
    if not isinstance(text, str):
        raise Refused(f"text must be a string, not {_json_type(text)}")
    if not text:
        raise Refused("text is empty; write some, or drop the line")
    _check_unicode("text", text)
    return text


def _checked_token_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list):
        raise Refused(f"prompt_token_ids must be a list of integers, not {_json_type(ids)}")
    if not ids:
        raise Refused("prompt_token_ids is empty; give at least one token id, or drop the line")
    for token in ids:
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise Refused(
                f"prompt_token_ids holds {json.dumps(token)[:40]}; ids are integers from 0 up"
            )
    return ids


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list):
        raise Refused(f"messages must be a list of objects, not {_json_type(messages)}")
    if not messages:
        raise Refused("messages is empty; give at least one message, or drop the line")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(
                f"messages[{index}] must be an object with a role, such as "
                '{"role": "user", "content": "..."}'
            )
        content = message.get("content")
        if not isinstance(content, (str, list)) and not (
            content is None and message.get("tool_calls")
        ):
            raise Refused(
                f"messages[{index}].content must be a string or a list of parts, not "
                f"{_json_type(content)}"
            )
        _check_unicode(f"messages[{index}]", json.dumps(message, ensure_ascii=False))
    return messages


_CHECKS: dict[Kind, Callable[[Any], Any]] = {
    "text": _checked_text,
    "prompt_token_ids": _checked_token_ids,
    "messages": _checked_messages,
}


def _checked_id(sample_id: Any) -> str:
    if not isinstance(sample_id, str):
        raise Refused(f"id must be a string, not {_json_type(sample_id)}; put it in quotes")
    if not 0 < len(sample_id) <= MAX_SAMPLE_ID_CHARS:
        raise Refused(f"id must have 1 to {MAX_SAMPLE_ID_CHARS} characters, not {len(sample_id)}")
    keys.component(sample_id)
    return sample_id


def _derived_id(entry: dict[str, Any], repeats: dict[str, int]) -> str:
    canonical = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    derived = f"auto-{hashlib.sha256(canonical.encode()).hexdigest()[:24]}"
    repeats[derived] = repeats.get(derived, 0) + 1
    return derived if repeats[derived] == 1 else f"{derived}-{repeats[derived]}"


def _tokenize_part(
    path: Path, lines: Sequence[PromptLine], tokenizer: Any
) -> Iterator[tuple[int, list[int]]]:
    texts = [line for line in lines if line.kind == "text"]
    if texts:
        encoded = tokenizer([line.content for line in texts])["input_ids"]
        yield from zip((line.number for line in texts), encoded, strict=True)
    for line in lines:
        if line.kind == "messages":
            yield line.number, _tokenize_messages(path, line, tokenizer)


def _tokenize_messages(path: Path, line: PromptLine, tokenizer: Any) -> list[int]:
    # A conversation that ends with the assistant is complete: asking for one more turn would put
    # tokens into the sample that nobody wrote.
    answered = line.content[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            line.content, tokenize=False, add_generation_prompt=not answered
        )
    except Exception as error:
        # Templates are programs of the checkpoint's own: they raise what they like.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refused(
            f"{path}, line {line.number}: the chat template cannot take these messages: {reason}"
        ) from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def _check_unicode(where: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(f"{where} holds a lone surrogate; give valid Unicode") from None


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    if value is None:
        return "null"
    return names.get(type(value), "a number")
