"""The Mooncake store's steps, against a store in memory that dies between any two of them."""

import gc

import msgspec
import numpy as np
import pytest
import torch

from stagetap.errors import (
    DuplicateSample,
    ForeignFile,
    ForeignStore,
    MalformedManifest,
    MissingFragment,
    Refused,
    SampleNotFound,
    StoreError,
)
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.reader.order import CommitOrder
from stagetap.stores.mooncake_buffers import BufferPool
from stagetap.stores.mooncake_layout import PAGE_WINDOW, sample_commit_key
from stagetap.stores.mooncake_objects import StoreFull
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_verify import verify_run
from store_samples import RUN, states, tapped, token_ids
from unit.stores.memory_objects import Died, Master, MemoryObjects, dies_at, fails_at
from unit.stores.memory_store import (
    dataset_of,
    errors_of,
    make_engine,
    objects_of,
    reader_of,
    sample_keys,
    with_one_far_sample,
)


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.mark.parametrize("slot_bytes", [1 << 16, 4 * 96, 96])
@pytest.mark.parametrize("sample_id", ["s", "a/b", "a_b", "index", "commit", "ü" * 90])
def test_what_is_written_is_read(master: Master, slot_bytes: int, sample_id: str) -> None:
    engine = make_engine(master, slot_bytes=slot_bytes)
    engine.export(sample_id, tokens=13, seed=5)
    sample = dataset_of(master)[sample_id]
    for k in engine.tapped.layer_ids:
        assert torch.equal(sample.layer(k), states(k, 13, 5).bfloat16())
    assert np.array_equal(sample.input_ids.numpy(), token_ids(13, 5))
    parts = [len(fragment.parts) for fragment in sample.manifest.fragments]
    assert parts == ([0, 0] if slot_bytes == 1 << 16 else parts)
    engine.close()


def test_ids_that_look_alike_are_two_samples(master: Master) -> None:
    engine = make_engine(master)
    engine.export("a/b", seed=1)
    engine.export("a_b", seed=2)
    dataset = dataset_of(master)
    assert not torch.equal(dataset["a/b"].layer(2), dataset["a_b"].layer(2))


def test_a_run_that_nobody_began_is_refused(master: Master) -> None:
    make_engine(master)
    with pytest.raises(ForeignStore, match="run-2"):
        reader_of(master, "run-2")


def test_a_second_engine_must_write_the_same_kind(master: Master) -> None:
    make_engine(master)
    make_engine(master)
    with pytest.raises(Refused, match="dtype"):
        make_engine(master, what=tapped(dtype="float32"))
    make_engine(master, what=tapped(dtype="float32"), run="another")


def test_two_engines_have_two_writers_and_see_each_others_commits(master: Master) -> None:
    one, other = make_engine(master), make_engine(master)
    one.export("a")
    other.export("b")
    assert one.committer.is_committed(RUN, "b")
    assert sorted(dataset_of(master).sample_ids) == ["a", "b"]
    with pytest.raises(DuplicateSample):
        other.export("a")
    # What the loser has stored is gone; the winner's is not.
    assert len(dataset_of(master)) == 2
    dataset_of(master)["a"].verify()
    assert len({key.split("/")[2] for key in master.objects if key.startswith(f"{RUN}/a/")}) == 2


@pytest.mark.parametrize("step", range(40))
def test_a_commit_that_dies_anywhere_can_be_retried(master: Master, step: int) -> None:
    """Whatever was told is in the index; what was not can be exported again, or is a duplicate."""
    engine = make_engine(master)
    engine.export("told")
    made = engine.publish(engine.ref("s"), 7)
    told = False
    objects_of(engine).before = dies_at(step)
    try:
        engine.committer.commit(made)
        told = True
    except Died:
        pass
    retry = make_engine(master)
    if retry.committer.is_committed(RUN, "s"):
        assert step > 0
    else:
        assert not told
        retry.export("s")
    assert sorted(dataset_of(master).sample_ids) == ["s", "told"]
    for sample in dataset_of(master):
        sample.verify()


@pytest.mark.parametrize("step", range(6))
def test_a_commit_that_fails_anywhere_is_neither_visible_nor_durable(
    master: Master, step: int
) -> None:
    engine = make_engine(master)
    made = engine.publish(engine.ref("s"), 7)
    objects_of(engine).before = fails_at(step)
    try:
        engine.committer.commit(made)
    except StoreError:
        assert len(dataset_of(master)) == 0
        assert not make_engine(master).committer.is_committed(RUN, "s")
        engine.export("s")
    assert dataset_of(master).sample_ids == ["s"]


@pytest.mark.parametrize("taken_back", [True, False])
def test_a_commit_that_cannot_be_read_back_is_none_or_is_found(
    master: Master, taken_back: bool
) -> None:
    """The store hangs between its put and its read-back; the caller is told that it failed."""
    engine = make_engine(master)
    objects = objects_of(engine)
    get, hangs = objects.get, [1 if taken_back else 2]

    def hang(key: str) -> bytes | None:
        if key == sample_commit_key(RUN, "s") and hangs[0]:
            hangs[0] -= 1
            raise StoreError("no answer")
        return get(key)

    objects.get = hang  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="no answer"):
        engine.export("s")
    assert engine.committer.is_committed(RUN, "s") is not taken_back
    if taken_back:
        assert sample_keys(master) == []
        engine.export("s")
    assert dataset_of(master).sample_ids == ["s"]


def test_what_was_deleted_is_out_of_the_store_when_the_process_ends(master: Master) -> None:
    master.lease_s = 0.3
    engine = make_engine(master)
    engine.export("s")
    reader = reader_of(master)
    dataset = HiddenStatesDataset(reader, CommitOrder())
    dataset.refresh()
    dataset["s"].verify()
    dataset.delete("s")
    assert sample_keys(master), "its leases have not ended"
    assert dataset_of(master).sample_ids == []
    reader.close()
    assert sample_keys(master) == []


def test_a_removal_that_the_store_fails_over_goes_on(master: Master) -> None:
    engine = make_engine(master)
    engine.export("s")
    engine.export("t")
    dataset = dataset_of(master)
    objects = dataset._reader.connection.objects  # type: ignore[attr-defined]
    objects.before = fails_at(1)  # the data; the tombstone is there
    dataset.delete("s")
    dataset.delete("t")
    dataset._reader.settle(5)  # type: ignore[attr-defined]
    assert sample_keys(master) == []


def test_a_page_number_is_never_used_twice(master: Master) -> None:
    engine = make_engine(master)
    late: list[tuple[str, bytes]] = []
    objects = objects_of(engine)
    put = objects.put

    def put_later(key: str, data: bytes) -> None:
        if "/index/" in key and not key.endswith("mark0"):
            late.append((key, data))
            raise StoreError("timed out")
        put(key, data)

    objects.put = put_later  # type: ignore[method-assign]
    with pytest.raises(StoreError, match="timed out"):
        engine.export("a")
    objects.put = put  # type: ignore[method-assign]
    engine.export("b")
    put(*late[0])  # it had only been slow
    dataset = dataset_of(master)
    assert dataset.sample_ids == ["b"]  # a's page names nothing
    dataset["b"].verify()


def test_a_master_that_forgot_everything_is_begun_anew(master: Master) -> None:
    engine = make_engine(master)
    reader = reader_of(master)
    for number in range(3):
        engine.export(f"before-{number}")
    assert len(reader.poll()[0]) == 3
    master.objects.clear()
    engine.export("after")
    reader._index._looked = float("-inf")  # type: ignore[union-attr]
    assert [entry.sample_id for entry in reader.poll()[0]] == ["after"]
    assert reader_of(master).invariant == reader.invariant


def test_a_late_reader_finds_what_is_far_behind_consumed_pages(master: Master) -> None:
    engine = make_engine(master)
    first = dataset_of(master)
    count = 3 * PAGE_WINDOW + 10
    for number in range(count):
        engine.export(f"s{number}", tokens=1)
    first.refresh()
    for number in range(count - 5):
        first.delete(f"s{number}")
    late = dataset_of(master)
    assert late.sample_ids == [f"s{number}" for number in range(count - 5, count)]
    with pytest.raises(Refused):
        late.load_state_dict(first.state_dict())
    engine.export("one more")
    assert late.refresh() == 1


def test_state_of_a_run_that_nobody_consumes_is_resumed(master: Master) -> None:
    engine = make_engine(master)
    for number in range(5):
        engine.export(f"s{number}", tokens=1)
    state = dataset_of(master).state_dict()
    engine.export("later", tokens=1)
    again = dataset_of(master)
    again.load_state_dict(state)
    assert again.sample_ids == [f"s{number}" for number in range(5)]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_mark_hides_no_page(master: Master, lost: int) -> None:
    with_one_far_sample(master)
    del master.objects[next(key for key in master.objects if key.endswith(f".mark{lost}"))]
    assert dataset_of(master).sample_ids == ["last"]


def test_nothing_of_a_deleted_sample_is_left(master: Master) -> None:
    engine = make_engine(master, slot_bytes=96)
    engine.export("a")
    engine.committer.record_error(engine.ref("b"), None, "broken")
    engine.export("b")
    dataset = dataset_of(master)
    held = dataset["a"]
    dataset.delete("a")
    dataset.delete("a")
    assert [key for key in sample_keys(master) if key.startswith(f"{RUN}/a/")] == []
    with pytest.raises(SampleNotFound):
        dataset["a"]
    dataset_of(master).delete("b")
    assert [key for key in sample_keys(master) if "error" not in key and "index" not in key] == []
    assert torch.equal(held.layer(2), states(2, 7).bfloat16())
    assert dataset_of(master).sample_ids == []
    engine.export("a")
    assert dataset_of(master).sample_ids == ["a"]


@pytest.mark.parametrize("step", range(20))
def test_a_removal_that_dies_anywhere_leaves_a_sample_or_none(master: Master, step: int) -> None:
    engine = make_engine(master)
    engine.export("s")
    dataset = dataset_of(master)
    objects = dataset._reader.connection.objects  # type: ignore[attr-defined]
    objects.before = dies_at(step)
    died = False
    try:
        dataset.delete("s")
    except Died:
        died = True
    survivor = dataset_of(master)
    assert survivor.sample_ids == ["s"] * (step == 0)
    for sample_id in survivor.sample_ids:
        survivor[sample_id].verify()
        survivor.delete(sample_id)
    verify_run(reader_of(master), lambda: list(master.objects), checksums=True, gc=True, settle_s=0)
    assert sample_keys(master) == []
    assert died == (step < 8)


def test_a_leased_sample_is_gone_at_once_and_removed_later() -> None:
    master = Master(lease_s=0.4)
    engine = make_engine(master)
    engine.export("s")
    dataset = dataset_of(master)
    dataset["s"].verify()
    dataset.delete("s")
    with pytest.raises(SampleNotFound):
        dataset["s"]
    reader = dataset._reader
    assert isinstance(reader, MooncakeStoreReader)
    assert sample_keys(master)
    reader.settle(5)
    assert sample_keys(master) == []


def test_a_lease_that_never_ends_is_named() -> None:
    master = Master(lease_s=60)
    engine = make_engine(master)
    engine.export("s")
    reader = reader_of(master, lease_wait_s=0.2)
    commits, _ = reader.poll()
    reader.delete(commits)
    with pytest.raises(StoreError, match="lease_wait"):
        reader.settle(5)


@pytest.mark.parametrize("slot_bytes", [1 << 16, 96])
def test_a_fragment_that_was_removed_is_named(master: Master, slot_bytes: int) -> None:
    engine = make_engine(master, slot_bytes=slot_bytes)
    made = engine.export("s")
    second = made.fragments[1]
    dataset = dataset_of(master)
    for key in second.parts or (second.path,):
        whole = dict(master.objects)
        del master.objects[key]
        with pytest.raises(MissingFragment, match=r"sample 's'.*stage 1 \(layers 4, 6\)") as caught:
            dataset["s"]
        assert (caught.value.sample_id, caught.value.stage, caught.value.layer) == ("s", 1, 4)
        master.objects = whole


def test_an_attempt_of_another_place_is_refused(master: Master) -> None:
    engine = make_engine(master)
    made = engine.publish(engine.ref("s"), 3)
    moved = msgspec.structs.replace(made.fragments[1], path=made.fragments[0].path)
    wrong = msgspec.structs.replace(made, fragments=(made.fragments[0], moved))
    engine.committer.commit(wrong)
    with pytest.raises(ForeignFile, match="stage 1"):
        dataset_of(master)["s"]


def test_a_commit_names_only_what_is_there(master: Master) -> None:
    engine = make_engine(master)
    made = engine.publish(engine.ref("s"), 3)
    del master.objects[made.fragments[0].path]
    with pytest.raises(StoreError, match="capture the sample again"):
        engine.committer.commit(made)
    with pytest.raises(MalformedManifest, match="run"):
        engine.committer.commit(msgspec.structs.replace(made, run_id="other"))
    assert not engine.committer.is_committed(RUN, "s")


def test_a_failure_is_found_and_a_retry_hides_it(master: Master) -> None:
    engine = make_engine(master)
    engine.committer.record_error(engine.ref("s"), 1, "no space")
    engine.committer.record_error(engine.ref("s"), None, "again")
    dataset = dataset_of(master)
    found = dataset._reader.failures(None, "s")
    assert [(each.stage, each.cause) for each in found] == [(1, "no space"), (None, "again")]
    engine.export("s")
    assert dataset._reader.failures(None, "s") == []
    dataset.wait("s", 1).verify()


def test_a_full_store_waits_and_then_fails(master: Master) -> None:
    engine = make_engine(master)
    engine.export("s")
    stored = sum(map(len, master.objects.values()))
    before = set(master.objects)
    master.room_bytes = stored + 100
    assert all("StoreFull" in error for error in errors_of(engine, engine.ref("t"), 50))
    assert set(master.objects) == before
    master.room_bytes = 1 << 30
    engine.export("t", 50)


def test_an_attempt_id_is_used_once(master: Master) -> None:
    engine = make_engine(master)
    ref = engine.ref("s")
    engine.publish(ref, 3)
    assert all("used twice" in error for error in errors_of(engine, ref, 3))


def test_buffers_are_used_again_once_nobody_holds_them(master: Master) -> None:
    objects = MemoryObjects(master)
    pool = BufferPool(objects, allocate=lambda size: np.zeros(size, np.uint8))
    first = pool.take(100_000)
    address = first.ctypes.data
    tensor = torch.frombuffer(first.data[:8], dtype=torch.int64)
    del first
    gc.collect()
    assert pool.take(100_000).ctypes.data != address  # the tensor still holds it
    del tensor
    gc.collect()
    assert {pool.take(70_000).ctypes.data for _ in range(4)} <= {address, *objects.registered}
    assert pool.made == 2
    many = [pool.take(100_000) for _ in range(9)]
    assert pool.made == 9
    del many
    gc.collect()
    pool.take(1)
    assert len(objects.registered) == 5


def test_a_reader_of_many_samples_makes_few_buffers(master: Master) -> None:
    engine = make_engine(master)
    for number in range(30):
        engine.export(f"s{number}", tokens=50, seed=number)
    dataset = dataset_of(master)
    for number, sample in enumerate(dataset):
        assert torch.equal(sample.layer(4), states(4, 50, number).bfloat16())
    assert dataset._reader.connection.buffers.made <= 6  # type: ignore[attr-defined]


def test_full_is_a_store_error() -> None:
    assert issubclass(StoreFull, StoreError)
