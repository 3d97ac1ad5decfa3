"""The series folder and its lock."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.patchstack.series import (
    Lock,
    Pin,
    Series,
    SeriesError,
    decode_lock,
    parse_series,
    read_series,
    series_text,
    write_series,
)

_hashes = st.binary(max_size=4).map(lambda data: hashlib.sha256(data).hexdigest())
_locks = st.builds(
    Lock,
    vllm_version=st.just("0.32.0"),
    series_sha256=_hashes,
    files=st.dictionaries(
        st.text(min_size=1), st.builds(Pin, before=st.none() | _hashes, after=_hashes)
    ),
)


@given(_locks)
def test_locks_survive_encoding(lock: Lock) -> None:
    assert decode_lock(lock.encode()) == lock


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "files": []}', b"null"]
)
def test_a_damaged_lock_is_named(damage: bytes) -> None:
    with pytest.raises(SeriesError, match=r"lock\.json"):
        decode_lock(damage)


def test_names_keep_their_order_and_comments_carry_nothing() -> None:
    assert parse_series(b"# why\n\n0002-b.patch\n 0001-a.patch \n") == [
        "0002-b.patch",
        "0001-a.patch",
    ]


@pytest.mark.parametrize("text", [b"a.patch\na.patch\n", b"../a.patch\n", b".hidden\n"])
def test_a_series_that_cannot_be_meant_is_an_error(text: bytes) -> None:
    with pytest.raises(SeriesError, match="series names"):
        parse_series(text)


def test_the_digest_is_what_the_shell_says(tmp_path: Path, series: Series) -> None:
    write_series(series, tmp_path)
    said = subprocess.run(
        "cat series $(cat series) | sha256sum",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        check=True,
    ).stdout
    assert said.split()[0].decode() == series.digest == series.lock.series_sha256


def test_writing_and_reading_is_the_identity(tmp_path: Path, series: Series) -> None:
    (tmp_path / "0009-stale.patch").write_text("gone afterwards")
    write_series(series, tmp_path)
    assert read_series(tmp_path) == series
    assert not (tmp_path / "0009-stale.patch").exists()


def test_writing_again_touches_no_file(tmp_path: Path, series: Series) -> None:
    write_series(series, tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.iterdir()}
    write_series(series, tmp_path)
    assert {path: path.stat().st_ino for path in tmp_path.iterdir()} == before


def test_patches_that_the_lock_does_not_answer_for_are_not_read(
    tmp_path: Path, series: Series
) -> None:
    write_series(series, tmp_path)
    name = series.patches[0].name
    (tmp_path / name).write_bytes(series.patches[0].data.replace(b"hook = 1", b"hook = 9"))
    with pytest.raises(SeriesError, match="are not those of its lock"):
        read_series(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(SeriesError, match=name):
        read_series(tmp_path)


def test_order_is_part_of_the_digest(series: Series) -> None:
    turned = Series(tuple(reversed(series.patches)), series.lock)
    assert turned.digest != series.digest
    assert series_text(["a", "b"]) == b"a\nb\n"
