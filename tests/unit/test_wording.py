"""Words of messages."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stagetap.wording import counted, one_line, shortened, shown


def test_what_is_long_loses_its_middle() -> None:
    assert shown("x") == "'x'"
    assert shown(list(range(1000))).startswith("[0, 1, 2")
    assert shown(list(range(1000))).endswith("998, 999]")
    assert len(shown("x" * 5000)) == 79
    assert shown(10**5000) == "int too large to show"
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "list too large to show"
    while deep:
        deep = deep[0]  # else taking it apart at once would exhaust the stack


def test_an_error_is_one_line() -> None:
    assert one_line(ValueError("a\n  b\n")) == "a b"
    assert one_line(ValueError()) == "ValueError"


def test_counts() -> None:
    assert [counted(number, "GPU") for number in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]


@given(st.text(max_size=300), st.integers(20, 100))
def test_any_text_becomes_one_line(text: str, characters: int) -> None:
    line = shortened(text, characters)
    assert len(line) <= characters
    assert line.isprintable() or not text.isprintable()
    assert len(line.splitlines()) <= 1


def test_what_turns_a_line_around_is_left_out() -> None:
    assert shortened("a\u202eb\u2028c\x1b[31md") == "a b c [31md"
