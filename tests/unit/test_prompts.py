"""Prompt files: every bad line is named before an engine starts, every good one is kept exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.prompts import (
    TokenPrompt,
    check_lengths,
    check_token_ids,
    read_prompt_file,
    tokenize,
)


class Tokenizer:
    """One token a character; a template that shows what it was asked for."""

    def __call__(self, texts: list[str]) -> dict[str, Any]:
        return {"input_ids": [[1, *map(ord, text)] for text in texts]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [*([1] if add_special_tokens else []), *map(ord, text)]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        if any(message["role"] == "tool" for message in messages):
            raise RuntimeError("no tools\nin this template")
        turns = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return turns + ("<assistant>" if add_generation_prompt else "")


def no_tokenizer() -> Any:
    pytest.fail("the tokenizer was loaded for nothing")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


def write(file: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    file.write_bytes("\n".join(texts).encode("utf-8", "surrogatepass"))
    return file


GOOD = {"text": "hello", "id": "good"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON"),
        ('{"text": "a"} x', "not JSON"),
        ("[1]", "a JSON object is needed, not a list"),
        ('"text"', "a JSON object is needed, not a string"),
        ("null", "a JSON object is needed, not null"),
        ("true", "a JSON object is needed, not a boolean"),
        ("7", "a JSON object is needed, not a number"),
        ("{}", "exactly one of text, prompt_token_ids, messages is needed, found none"),
        ({"id": "a"}, "found none"),
        ({"text": "a", "prompt_token_ids": [1]}, "found text and prompt_token_ids"),
        ({"text": "a", "messages": []}, "found text and messages"),
        ({"text": "a", "meta": {}}, "unknown key 'meta'; known are"),
        ({"prompt": "a"}, "unknown key 'prompt'"),
        ({"text": ""}, "text is empty"),
        ({"text": None}, "text must be a string, not null"),
        ({"text": ["a"]}, "text must be a string, not a list"),
        ('{"text": "\\ud800"}', "lone surrogate"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"prompt_token_ids": "1,2"}, "must be a list of integers, not a string"),
        ({"prompt_token_ids": [1, True]}, "holds true"),
        ({"prompt_token_ids": [1, 2.0]}, "holds 2.0"),
        ({"prompt_token_ids": [-1]}, "holds -1"),
        ({"prompt_token_ids": [2**31]}, "holds 2147483648"),
        ({"prompt_token_ids": [[1]]}, "holds [1]"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "hi"}, "messages must be a list of objects"),
        ({"messages": ["hi"]}, "messages[0] must be an object with a role"),
        ({"messages": [{"content": "hi"}]}, "messages[0] must be an object with a role"),
        ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0] must be an object"),
        ({"messages": [{"role": "user"}]}, "messages[0].content must be"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content must be"),
        ({"text": "a", "id": ""}, "id must have 1 to 1024 characters, not 0"),
        ({"text": "a", "id": "x" * 1025}, "not 1025"),
        ({"text": "a", "id": 7}, "id must be a string, not a number"),
        ({"text": "a", "id": None}, "id must be a string, not null"),
        ('{"text": "a", "id": "\\ud800"}', "lone surrogate"),
        ({"text": "a", "id": "good"}, "id 'good' is that of line 1 already"),
        ({"text": "a", "metadata": []}, "metadata must be a JSON object, not list"),
        ({"text": "a", "metadata": {"big": "x" * 70_000}}, "65536"),
        ('{"text": "a", "metadata": {"x": NaN}}', "NaN is not JSON"),
        ('{"text": "a", "text": "b"}', "key 'text' is there twice"),
        ('{"text": "a", "metadata": {"x": 1, "x": 2}}', "key 'x' is there twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_bad_line_is_named(file: Path, line: Any, said: str) -> None:
    write(file, GOOD, "", line, GOOD | {"id": "later"})
    with pytest.raises(Refused) as refused:
        read_prompt_file(file)
    assert f"{file}, line 3: " in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_bytes_that_are_not_utf8_are_named(file: Path) -> None:
    file.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(Refused, match=r"line 2: byte 11 is not UTF-8"):
        read_prompt_file(file)


@pytest.mark.parametrize("content", ["", "\n\n", "  \n"])
def test_a_file_without_prompts(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(Refused, match="holds no prompt"):
        read_prompt_file(file)


def test_a_file_that_is_not_there(file: Path) -> None:
    with pytest.raises(Refused, match="No such file"):
        read_prompt_file(file)
    with pytest.raises(Refused, match="directory"):
        read_prompt_file(file.parent)


def test_lines_keep_what_they_hold(file: Path) -> None:
    write(
        file,
        {"text": "héllo", "id": "a/b", "metadata": {"n": 1}},
        {"prompt_token_ids": [5, 0, 7]},
        {"messages": [{"role": "user", "content": "hi"}]},
    )
    lines = read_prompt_file(file)
    assert [line.number for line in lines] == [1, 2, 3]
    assert lines[0].sample_id == "a/b"
    assert lines[0].metadata == {"n": 1}
    prompts = tokenize(file, lines, Tokenizer)
    assert [prompt.token_ids.tolist() for prompt in prompts] == [
        [1, *map(ord, "héllo")],
        [5, 0, 7],
        list(map(ord, "<user>hi<assistant>")),
    ]
    assert prompts[1].token_ids.dtype == np.int32


def test_derived_ids_belong_to_the_content(file: Path) -> None:
    first = read_prompt_file(write(file, {"text": "a"}, {"text": "b"}, {"text": "a"}))
    moved = read_prompt_file(write(file, {"text": "new"}, {"text": "b"}, {"text": "a"}))
    by_text = {line.content: line.sample_id for line in first[:2]}
    assert by_text == {line.content: line.sample_id for line in moved if line.content != "new"}
    assert first[2].sample_id == f"{first[0].sample_id}-2"
    other = read_prompt_file(write(file, {"text": "a", "metadata": {"k": 1}}))
    assert other[0].sample_id not in {line.sample_id for line in first}


def test_the_tokenizer_is_loaded_only_when_needed(file: Path) -> None:
    lines = read_prompt_file(write(file, {"prompt_token_ids": [1]}))
    assert tokenize(file, lines, no_tokenizer)[0].token_ids.tolist() == [1]


def test_a_finished_conversation_gets_no_further_turn(file: Path) -> None:
    asked = {"role": "user", "content": "q"}
    answered = {"role": "assistant", "content": "a"}
    lines = read_prompt_file(write(file, {"messages": [asked, answered]}))
    (prompt,) = tokenize(file, lines, Tokenizer)
    assert prompt.token_ids.tolist() == list(map(ord, "<user>q<assistant>a"))


def test_a_template_that_fails_names_the_line(file: Path) -> None:
    lines = read_prompt_file(write(file, GOOD, {"messages": [{"role": "tool", "content": "x"}]}))
    with pytest.raises(Refused, match=r"line 2: the chat template cannot take .*: no tools$"):
        tokenize(file, lines, Tokenizer)


def test_a_text_without_tokens_names_the_line(file: Path) -> None:
    class Silent(Tokenizer):
        def __call__(self, texts: list[str]) -> dict[str, Any]:
            return {"input_ids": [[] for _ in texts]}

    with pytest.raises(Refused, match="line 1: the prompt has no tokens"):
        tokenize(file, read_prompt_file(write(file, GOOD)), Silent)


def prompt(number: int, length: int, highest: int = 3) -> TokenPrompt:
    ids = np.full(length, highest, dtype=np.int32)
    return TokenPrompt(number=number, sample_id=str(number), token_ids=ids, metadata={})


@pytest.mark.parametrize(("length", "output", "fits"), [(9, 0, True), (10, 0, False)])
def test_one_token_of_output_is_always_made(
    file: Path, length: int, output: int, fits: bool
) -> None:
    if fits:
        check_lengths(file, [prompt(1, length)], 10, output)
    else:
        with pytest.raises(
            Refused,
            match="10 tokens and the one that the engine makes of each exceed",
        ):
            check_lengths(file, [prompt(1, length)], 10, output)


def test_prompts_that_are_too_long_are_named(file: Path) -> None:
    prompts = [prompt(number, 5 + number) for number in range(1, 5)]
    check_lengths(file, prompts, 12, 3)
    with pytest.raises(Refused, match=r"line 3 \(and lines 4\): 8 tokens and 3 of output"):
        check_lengths(file, prompts, 10, 3)
    many = [prompt(number, 50) for number in range(1, 20)]
    with pytest.raises(Refused, match=r"line 1 \(and lines 2, 3, 4, 5, 6, \.\.\.\)"):
        check_lengths(file, many, 10, 0)


def test_token_ids_outside_the_vocabulary_are_named(file: Path) -> None:
    check_token_ids(file, [prompt(1, 2, highest=9)], 10)
    with pytest.raises(Refused, match=r"line 4: token id 10 is outside the vocabulary of 10"):
        check_token_ids(file, [prompt(1, 2), prompt(4, 2, highest=10)], 10)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["text", "id", "messages", "role", "x"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(JSON | st.binary(max_size=40))
def test_any_line_is_read_or_refused(file: Path, line: Any) -> None:
    file.write_bytes(line if isinstance(line, bytes) else json.dumps(line).encode())
    try:
        lines = read_prompt_file(file)
    except Refused:
        return
    assert len({line.sample_id for line in lines}) == len(lines)
