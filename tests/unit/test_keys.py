"""Names are safe, distinct and bounded, whatever the id."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.keys import (
    MAX_COMPONENT_BYTES,
    RESERVED,
    commit_key,
    component,
    error_key,
    fragment_key,
)

SAFE = re.compile(r"[A-Za-z0-9_%~-][A-Za-z0-9._%~-]*")
# Texts that are made to meet: escapes spelt out, separators, dots, and ids beyond the bound.
tricky = st.text(alphabet="%2F/.~_aé\0", min_size=1, max_size=6)
long = st.text(alphabet="aé/", min_size=40, max_size=140)
ids = st.one_of(st.text(min_size=1), tricky, long, st.sampled_from(sorted(RESERVED)))


@settings(deadline=None, max_examples=50)
@given(ids)
@example("..")
@example(".hidden")
@example("a\0b\n")
@example("x" * 100_000)
@example("😀" * 50)
@example("con/../../etc/passwd")
def test_a_name_is_safe_and_bounded(text: str) -> None:
    name = component(text)
    assert SAFE.fullmatch(name)
    assert len(name.encode()) <= MAX_COMPONENT_BYTES
    assert name not in RESERVED
    assert not name.startswith("error.")


@settings(deadline=None, max_examples=50)
@given(ids, ids)
@example("a/b", "a_b")
@example("a/b", "a%2Fb")
@example("commit", "%63ommit")
@example("A", "a")
@example("é", "e\u0301")
@example("x" * 200 + "1", "x" * 200 + "2")
def test_different_ids_have_different_names(one: str, other: str) -> None:
    assert (component(one) == component(other)) == (one == other)


@settings(deadline=None, max_examples=50)
@given(ids)
def test_a_name_is_never_mistaken_for_the_id_it_stands_for(text: str) -> None:
    # The long form of one id, given as an id itself, must lead elsewhere.
    name = component(text)
    assert (component(name) == name) == (name == text)


def test_plain_ids_stay_readable() -> None:
    assert component("sample-0001.a_B") == "sample-0001.a_B"
    assert component("a/b") == "a%2Fb"


@pytest.mark.parametrize("text", ["", "a\ud800b"])
def test_what_cannot_be_a_name_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        component(text)


def test_keys_carry_the_attempt() -> None:
    assert fragment_key("r", "a/b", "t1", 3) == "r/a%2Fb/t1/3"
    assert error_key("r", "s", "t1", 3) == "r/s/t1/error.3"
    assert error_key("r", "s", "t1", None) == "r/s/t1/error"
    assert commit_key("r", "s") == "r/s/commit"
    with pytest.raises(Refused, match="stage -1"):
        fragment_key("r", "s", "t", -1)


@settings(deadline=None, max_examples=50)
@given(ids, ids, st.integers(0, 9))
def test_no_attempt_hides_a_commit(sample: str, attempt: str, stage: int) -> None:
    below = fragment_key("r", sample, attempt, stage)
    assert not below.startswith(commit_key("r", sample) + "/")
    assert len(below.split("/")) == 4
