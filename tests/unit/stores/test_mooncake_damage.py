"""Bytes of a Mooncake store that are not those that were stored, in memory: named, or put right."""

import pytest

from stagetap.errors import (
    ChecksumMismatch,
    CorruptLog,
    ForeignFile,
    MissingFragment,
    SampleNotFound,
    TokenMismatch,
    TruncatedFragment,
)
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.stores.mooncake_layout import MARK_EVERY, sample_commit_key
from store_samples import RUN
from unit.stores.memory_objects import Master, MemoryObjects
from unit.stores.memory_store import dataset_of, flip, make_engine, reader_of, with_one_far_sample


@pytest.fixture
def master() -> Master:
    return Master()


def test_a_flipped_byte_is_seen(master: Master) -> None:
    engine = make_engine(master)
    made = engine.export("s")
    path = made.fragments[1].path
    good = master.objects[path]
    master.objects[path] = flip(good, 5)
    for verify in (True, None):
        with pytest.raises(ChecksumMismatch, match="stage 1"):
            dataset_of(master, verify)["s"]
    dataset_of(master, verify=False)["s"]
    master.objects[path] = good
    ids = f"{made.fragments[0].path}/input_ids"
    master.objects[ids] = flip(master.objects[ids])
    with pytest.raises(TokenMismatch):
        dataset_of(master, verify=False)["s"]


def test_other_sizes_are_seen_without_verifying(master: Master) -> None:
    engine = make_engine(master)
    made = engine.export("s")
    path = made.fragments[1].path
    good = master.objects[path]
    for wrong, error in ((good[:-1], TruncatedFragment), (good + b"x", ForeignFile)):
        master.objects[path] = wrong
        with pytest.raises(error):
            dataset_of(master, verify=False)["s"]


@pytest.mark.parametrize("name", ["commit", "stagetap.json", "writers/0", ".0"])
def test_a_damaged_record_is_named(master: Master, name: str) -> None:
    engine = make_engine(master)
    engine.export("s")
    key = next(key for key in master.objects if key.endswith(name))
    master.objects[key] = flip(master.objects[key], -2)
    with pytest.raises(CorruptLog, match=key):
        dataset_of(master)["s"]


@pytest.mark.parametrize("name", ["writers/0", "stagetap.json"])
def test_what_introduces_a_run_is_put_right_by_the_next_commit(master: Master, name: str) -> None:
    """As after a write that a dead link held up, into memory that is another object's by now."""
    engine, other = make_engine(master), make_engine(master)
    engine.export("before")
    key = next(key for key in master.objects if key.endswith(name))
    right = master.objects[key]
    master.objects[key] = flip(right, -2)
    other.export("other's")
    engine.export("after")
    assert master.objects[key] == right
    assert sorted(dataset_of(master).sample_ids) == ["after", "before", "other's"]


def test_what_is_damaged_of_one_engine_hides_nothing_of_another(master: Master) -> None:
    first, second = make_engine(master), make_engine(master)
    first.export("first")
    second.export("second")
    key = next(key for key in master.objects if key.endswith("writers/0"))
    master.objects[key] = flip(master.objects[key], -2)
    reader = reader_of(master)
    with pytest.raises(CorruptLog, match=f"{key} .* with the next sample that it commits"):
        reader.poll()
    assert [entry.sample_id for entry in reader.poll()[0]] == ["second"]
    reader._index._looked = float("-inf")  # type: ignore[union-attr]
    assert reader.poll() == ([], [])  # said once
    assert make_engine(master).committer.is_committed(RUN, "first")


def test_a_number_that_another_engine_took_is_not_ours(master: Master) -> None:
    """After a restart of the master: of two engines the second one begins the run anew."""
    first, second = make_engine(master), make_engine(master)
    master.objects.clear()
    second.export("second")
    first.export("first")
    assert sorted(dataset_of(master).sample_ids) == ["first", "second"]


@pytest.mark.parametrize("damaged", [(0,), (1,), (0, 1)])
def test_a_damaged_mark_hides_no_page(master: Master, damaged: tuple[int, ...]) -> None:
    engine = with_one_far_sample(master)
    for number in damaged:
        key = next(key for key in master.objects if key.endswith(f".mark{number}"))
        master.objects[key] = flip(master.objects[key], -2)
    if len(damaged) == 2:
        with pytest.raises(CorruptLog, match="mark0 is damaged"):
            dataset_of(master)
        for number in range(MARK_EVERY):
            engine.export(f"later{number}", tokens=1)
        assert len(dataset_of(master)) == 1 + MARK_EVERY
    else:
        assert dataset_of(master).sample_ids == ["last"]


def test_a_damaged_mark_of_a_young_run_hides_no_page(master: Master) -> None:
    engine = make_engine(master)
    engine.export("before")
    for name in ("writers/0", ".mark0"):
        key = next(key for key in master.objects if key.endswith(name))
        master.objects[key] = flip(master.objects[key], -2)
    with pytest.raises(CorruptLog, match="writers/0 is damaged"):
        dataset_of(master)
    engine.export("after")
    assert dataset_of(master).sample_ids == ["before", "after"]


def test_a_damaged_page_hides_no_other(master: Master) -> None:
    engine = make_engine(master)
    for number in range(3):
        engine.export(f"s{number}")
    key = next(key for key in master.objects if key.endswith(".1"))
    master.objects[key] = flip(master.objects[key], -2)
    reader = reader_of(master)
    with pytest.raises(CorruptLog):
        reader.poll()
    assert [entry.sample_id for entry in reader.poll()[0]] == ["s0", "s2"]


def torn(objects: MemoryObjects, key: str, other: str) -> None:
    """Let the next read of `key` meet its removal: it brings what is stored in its place."""
    get = objects.get

    def get_other(asked: str) -> bytes | None:
        if asked != key:
            return get(asked)
        objects.get = get  # type: ignore[method-assign]
        objects.master.objects.pop(key)
        return get(other)

    objects.get = get_other  # type: ignore[method-assign]


def test_what_is_read_while_it_is_removed_is_not_believed(master: Master) -> None:
    engine = make_engine(master)
    made = [engine.export(name) for name in ("a", "b", "c")]
    dataset = dataset_of(master)
    objects = dataset._reader.connection.objects  # type: ignore[attr-defined]
    objects.exist = lambda keys: [key in master.objects for key in keys]
    commits = [sample_commit_key(RUN, name) for name in ("a", "b", "c")]
    torn(objects, commits[0], commits[1])
    with pytest.raises(SampleNotFound):
        dataset["a"]
    unverified = HiddenStatesDataset(dataset._reader, dataset._order)
    torn(objects, made[1].fragments[0].path, made[2].fragments[0].path)
    with pytest.raises(MissingFragment, match="stage 0"):
        unverified["b"]
    late = reader_of(master)
    late_objects = late.connection.objects
    assert isinstance(late_objects, MemoryObjects)
    late_objects.exist = objects.exist  # type: ignore[method-assign]
    pages = sorted(key for key in master.objects if "/index/" in key and "mark" not in key)
    torn(late_objects, pages[1], pages[2])
    assert [entry.sample_id for entry in late.poll()[0]] == ["c"]


def test_a_commit_over_a_damaged_one_names_it(master: Master) -> None:
    engine = make_engine(master)
    engine.export("s")
    key = sample_commit_key(RUN, "s")
    master.objects[key] = flip(master.objects[key], -2)
    with pytest.raises(CorruptLog, match=key):
        engine.export("s")
