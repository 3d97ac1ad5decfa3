"""A YAML file is a map of texts in which each thing stands once; all else is one line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stagetap.cli.doctor_config import Expectations
from stagetap.cli.doctor_recipe import examine
from stagetap.errors import Refused
from stagetap.findings import SEE_FOUND, Finding
from stagetap.yaml_file import read_yaml_map

BOMB = "l0: &l0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 9)}]\n" for level in range(1, 12)
)


def written(folder: Path, text: str) -> Path:
    file = folder / "file.yaml"
    file.write_text(text)
    return file


def test_a_map(tmp_path: Path) -> None:
    assert read_yaml_map(written(tmp_path, "a: &x 1\n'2': {b: [on]}\n")) == {
        "a": 1,
        "2": {"b": [True]},
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [\n", "cannot be read"),
        (BOMB, r"line 2: \*l0 is an alias"),
        (f"stagetap-recipe: 1\n{BOMB}", r"line 3: \*l0 is an alias"),
        ("a: &a [*a]\n", r"line 1: \*a is an alias"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "is an alias"),
        ("a: {<<: {b: 1}}\n", "'<<' is a key and no text"),
        (f"a: {'[' * 100_000}", "line 1: more than 32 levels"),
        ("a: 1\na: 2\n", "line 2: 'a' stands twice"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "line 2: 'max-num-seqs' stands twice"),
        ("a:\n  b: 1\n  b: 2\n", "line 3: 'b' stands twice"),
        ("", "holds nothing; give a file of keys and values"),
        ("word\n", "holds 'word'"),
        ("[a, b]\n", r"holds \['a', 'b'\]"),
        ("1: a\n", "line 1: '1' is a key and no text: quote it"),
        ("on: a\n", "'on' is a key"),
        ("? [a, b]\n: c\n", "is a key and no text"),
        ("a: 2024-99-99\n", "cannot be read"),
        (f"a: {'9' * 5000}\n", "cannot be read"),
        ("a: !!python/name:os.system ''\n", "cannot be read"),
        ("a: b\n---\nc: d\n", "cannot be read"),
        (f"a: {'b' * 300_000}\n", "more than 131072 bytes"),
    ],
)
def test_all_else_is_refused_in_one_line_at_once(text: str, says: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    began = time.monotonic()
    with pytest.raises(Refused, match=says) as refused:
        read_yaml_map(file)
    assert time.monotonic() - began < 5
    assert str(file) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 700
    assert examine(file, Expectations()) == (
        [Finding("configuration", str(refused.value), SEE_FOUND)],
        [],
    )


@pytest.mark.parametrize("name", [".", "nowhere.yaml", "n" * 5000])
def test_what_is_no_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read") as refused:
        read_yaml_map(tmp_path / name)
    assert len(str(refused.value)) < 700
    (finding,), _ = examine(tmp_path / name, Expectations())
    assert "is no file; give one" in finding.found


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (file := tmp_path / "file.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(Refused, match="cannot be read"):
        read_yaml_map(file)
