"""A torn last line is no commit; any other line that cannot be read is an error with a place."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stagetap
from stagetap.errors import CorruptLog, MalformedManifest, StoreError, UnknownVersion
from stagetap.stores.file_log import LogFolder, LogWriter, decode_line, encode_line
from store_samples import Engine


@pytest.fixture
def log(root: Path) -> Path:
    """The log of an engine that committed a, b and c and has ended."""
    engine = Engine(root)
    for sample_id in "abc":
        engine.export(sample_id, tokens=3)
    engine.close()
    (path,) = (root / "commits").iterdir()
    return path


def lines_of(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines(keepends=True)


def test_a_line_is_json_and_its_own_witness() -> None:
    line = encode_line(b'{"a":1}')
    assert line == b'{"check":"xxh3_64:4bb2cfb57f4e67df","a":1}\n' or line.endswith(b'","a":1}\n')
    assert decode_line(line[:-1]) == b'{"a":1}'


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_any_changed_byte_of_a_line_is_seen(at: int, flip: int) -> None:
    line = bytearray(encode_line(b'{"committed_at_ns":12,"manifest":{"a":"b"}}')[:-1])
    line[at % len(line)] ^= flip
    assert decode_line(bytes(line)) is None


def test_a_torn_last_line_is_ignored_wherever_it_was_torn(root: Path, log: Path) -> None:
    whole = log.read_bytes()
    last = lines_of(log)[-1]
    for torn in (1, 20, len(last) // 2, len(last) - 1):
        log.write_bytes(whole[:-torn])
        assert stagetap.open_dataset(root).sample_ids == ["a", "b"]


def test_a_line_that_is_being_written_is_read_once_it_is_whole(root: Path, log: Path) -> None:
    *rest, last = lines_of(log)
    log.write_bytes(b"".join(rest) + last[:50])
    dataset = stagetap.open_dataset(root)
    assert dataset.refresh() == 0
    with log.open("ab") as file:
        file.write(last[50:])
    assert dataset.refresh() == 1
    assert dataset.sample_ids == ["a", "b", "c"]


def test_a_writer_that_starts_again_does_not_write_behind_a_torn_line(
    root: Path, log: Path
) -> None:
    os.truncate(log, log.stat().st_size - 5)
    engine = Engine(root)
    assert not engine.committer.is_committed("run-1", "c")
    engine.export("c", tokens=3)
    engine.close()
    assert stagetap.open_dataset(root, verify=True).sample_ids == ["a", "b", "c"]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("harm", ["flip", "empty", "shorten", "garbage"])
def test_a_whole_line_that_is_wrong_is_an_error_with_its_place(
    root: Path, log: Path, number: int, harm: str
) -> None:
    lines = lines_of(log)
    line = bytearray(lines[number])
    line[len(line) // 2] ^= 1
    lines[number] = {
        "flip": bytes(line),
        "empty": b"\n",
        "shorten": lines[number][:40] + b"\n",
        "garbage": b"\xff\0garbage\n",
    }[harm]
    log.write_bytes(b"".join(lines))
    with pytest.raises(CorruptLog, match=f"{log} line {number + 1} is corrupt") as caught:
        stagetap.open_dataset(root)
    assert (caught.value.path, caught.value.line) == (str(log), number + 1)
    # Nobody may commit beside commits that cannot be read: their ids are not known.
    with pytest.raises(CorruptLog):
        Engine(root)


def test_a_torn_line_in_the_middle_is_an_error(root: Path, log: Path) -> None:
    first, second, third = lines_of(log)
    log.write_bytes(first + second[:-30] + third)
    with pytest.raises(CorruptLog, match="line 2"):
        stagetap.open_dataset(root)


def test_an_error_while_refreshing_loses_nothing(root: Path, log: Path) -> None:
    first, second, third = lines_of(log)
    log.write_bytes(first)
    dataset = stagetap.open_dataset(root)
    broken = bytearray(third)
    broken[30] ^= 1
    log.write_bytes(first + second + broken)
    with pytest.raises(CorruptLog, match="line 3"):
        dataset.refresh()
    log.write_bytes(first + second + third)
    assert dataset.refresh() == 2
    assert dataset.sample_ids == ["a", "b", "c"]


def test_a_log_that_vanishes_or_shrinks_under_a_reader_is_named(root: Path, log: Path) -> None:
    dataset = stagetap.open_dataset(root)
    whole = log.read_bytes()
    os.truncate(log, len(whole) // 2)
    with pytest.raises(StoreError, match=f"{log} became shorter"):
        dataset.refresh()
    log.unlink()
    with pytest.raises(StoreError, match=f"{log} is gone"):
        dataset.refresh()


def test_a_line_that_changed_after_it_was_indexed_is_seen(root: Path, log: Path) -> None:
    dataset = stagetap.open_dataset(root)
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)
    assert dataset["a"].sample_id == "a"
    with pytest.raises(CorruptLog, match="changed since"):
        dataset["b"]


def test_a_store_without_its_logs_is_damaged_and_not_empty(root: Path, log: Path) -> None:
    log.unlink()
    log.parent.rmdir()
    with pytest.raises(StoreError, match="commits"):
        stagetap.open_dataset(root)


def rewrite(log: Path, number: int, old: bytes, new: bytes) -> None:
    """Change a line as somebody would who recomputes its check."""
    lines = lines_of(log)
    body = decode_line(lines[number][:-1])
    assert body is not None
    assert old in body
    lines[number] = encode_line(body.replace(old, new))
    log.write_bytes(b"".join(lines))


def test_a_manifest_of_another_version_is_named_when_its_sample_is_read(
    root: Path, log: Path
) -> None:
    rewrite(log, 1, b'"manifest_version":1', b'"manifest_version":7')
    dataset = stagetap.open_dataset(root)
    assert dataset.sample_ids == ["a", "b", "c"]
    assert dataset["a"].sample_id == "a"
    with pytest.raises(UnknownVersion, match="sample 'b': manifest_version is 7"):
        dataset["b"]


def test_a_manifest_that_contradicts_itself_is_named_when_its_sample_is_read(
    root: Path, log: Path
) -> None:
    rewrite(log, 1, b'"token_count":3', b'"token_count":4')
    with pytest.raises(MalformedManifest, match="manifest of sample 'b'"):
        stagetap.open_dataset(root)["b"]


def test_a_whole_line_that_is_no_commit_is_named(root: Path, log: Path) -> None:
    with log.open("ab") as file:
        file.write(encode_line(b'{"something":"else"}'))
    with pytest.raises(CorruptLog, match="line 4 is whole but is no entry of this version"):
        stagetap.open_dataset(root)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.text(max_size=40), min_size=1, max_size=12),
    st.lists(st.integers(0, 4000), max_size=5),
    st.integers(1, 64),
)
def test_a_log_read_in_pieces_is_the_log(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    texts: list[str],
    cuts: list[int],
    chunk_bytes: int,
) -> None:
    directory = tmp_path_factory.mktemp("logs")
    writer = LogWriter(str(directory), "w")
    bodies = [b'{"text":"' + text.encode().hex().encode() + b'"}' for text in texts]
    for body in bodies:
        writer.append(body)
    writer.close()
    path = directory / "w.jsonl"
    whole = path.read_bytes()
    monkeypatch.setattr("stagetap.stores.file_log._CHUNK_BYTES", chunk_bytes)
    folder, found = LogFolder(str(directory)), []
    for cut in [*sorted(min(cut, len(whole)) for cut in cuts), len(whole)]:
        path.write_bytes(whole[:cut])
        entries, marks = folder.read(lambda line: line)
        folder.advance(marks)
        found += entries
    assert [line.body for line in found] == bodies
    assert [line.number for line in found] == list(range(len(bodies)))
    for line in found:
        assert folder.line("w", line.offset, line.length) == line.body
