"""The series folder and its lock."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetap.patchstack import operations
from stagetap.patchstack.lint import lint_folder
from stagetap.patchstack.patchfile import Patch
from stagetap.patchstack.series import (
    Lock,
    Pin,
    Series,
    SeriesError,
    decode_lock,
    load_series,
    parse_series,
    series_digest,
    series_text,
    write_series,
)
from unit.patchstack.synthetic import VERSION, snapshot

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
    "damage",
    [
        b"",
        b"[]",
        b"{}",
        b'{"format": 2}',
        b'{"format": 1, "files": []}',
        b"null",
        b"\xff",
        b"[" * 9999,
    ],
)
def test_a_damaged_lock_is_named(damage: bytes) -> None:
    with pytest.raises(SeriesError, match=r"lock\.json"):
        decode_lock(damage)


def test_names_keep_their_order_and_comments_carry_nothing() -> None:
    assert parse_series(b"# why\n\n0002-b.patch\n 0001-a.patch \n") == [
        "0002-b.patch",
        "0001-a.patch",
    ]


@pytest.mark.parametrize(
    "text", [b"a.patch\na.patch\n", b"../a.patch\n", b".hidden\n", b"\xff.patch\n"]
)
def test_a_series_that_cannot_be_meant_is_an_error(text: bytes) -> None:
    with pytest.raises(SeriesError, match=r"series (names|is not UTF-8)"):
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
    assert load_series(tmp_path) == series
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
        load_series(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(SeriesError, match=name):
        load_series(tmp_path)


_PIN = {"before": None, "after": "0" * 64}
CONTRADICTIONS: dict[str, Callable[[dict[str, Any]], object]] = {
    "vllm/envs.py is patched but not in it": lambda lock: lock["files"].pop("vllm/envs.py"),
    "vllm/x.py is in it but not patched": lambda lock: lock["files"].update({"vllm/x.py": _PIN}),
    "../x is in it but not patched": lambda lock: lock["files"].update({"../x": _PIN}),
    "is for vLLM 0.33.0": lambda lock: lock.update(vllm_version="0.33.0"),
    "is damaged": lambda lock: lock.pop("files"),
}


@pytest.mark.parametrize("said", CONTRADICTIONS)
def test_a_lock_that_is_not_of_its_patches_is_refused_everywhere(
    vllm: Path, patches: Path, said: str
) -> None:
    folder = patches / "vllm" / VERSION
    lock = json.loads((folder / "lock.json").read_bytes())
    CONTRADICTIONS[said](lock)
    (folder / "lock.json").write_text(json.dumps(lock))
    before = snapshot(vllm)
    for command in (operations.status, operations.apply, operations.verify):
        with pytest.raises(SeriesError) as refused:
            command(vllm, patches)
        assert said in str(refused.value)
        assert str(folder) in str(refused.value)
        assert "reinstall stagetap, or run `stagetap patch export`" in str(refused.value)
    (found,) = lint_folder(folder)
    assert said in found
    assert snapshot(vllm) == before


@pytest.mark.parametrize("path", ["../x.py", "vllm/../../x.py", "other/x.py"])
def test_a_series_that_leads_out_of_vllm_is_refused(
    tmp_path: Path, series: Series, path: str
) -> None:
    module = "vllm/stagetap_hooks.py"
    data = series.patches[1].data.replace(module.encode(), path.encode())
    patches = (Patch("0001-out.patch", data),)
    lock = Lock(VERSION, series_digest(patches), {path: series.lock.files[module]})
    write_series(Series(patches, lock), tmp_path)
    with pytest.raises(SeriesError, match="no file of vLLM"):
        load_series(tmp_path)


def test_order_is_part_of_the_digest(series: Series) -> None:
    turned = Series(tuple(reversed(series.patches)), series.lock)
    assert turned.digest != series.digest
    assert series_text(["a", "b"]) == b"a\nb\n"
