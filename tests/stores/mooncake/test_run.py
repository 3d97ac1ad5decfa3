"""A run in a real store: written, read, broken, consumed; in this process alone."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

import stagetap
from mooncake_run import SIZES, Clients, Run
from stagetap.errors import (
    ChecksumMismatch,
    ForeignStore,
    MissingFragment,
    Refused,
    SampleFailed,
    SampleNotFound,
    SampleTimeout,
    StoreError,
)
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.stores.base import (
    open_store_committer,
)
from stagetap.stores.mooncake_client import MooncakeClient
from stagetap.stores.mooncake_processes import Master
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from store_samples import Engine, drain, job, states, tapped, token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("slot_bytes", [1 << 16, 1 << 10])
def test_what_is_written_is_read_bitwise(
    master: Master, clients: Clients, dtype: str, slot_bytes: int
) -> None:
    run = Run(master, clients, what=tapped(dtype=dtype), slot_bytes=slot_bytes)
    for sample_id, tokens in (("a/b", 1), ("a_b", 33), ("ü" * 200, 129)):
        run.engine.export(sample_id, tokens, seed=tokens)
    dataset = run.dataset()
    assert dataset.sample_ids == ["a/b", "a_b", "ü" * 200]
    for sample in dataset:
        tokens = sample.manifest.token_count
        for k in run.engine.tapped.layer_ids:
            expected = states(k, tokens, tokens).to(getattr(torch, dtype))
            assert torch.equal(sample.layer(k), expected)
        assert np.array_equal(sample.input_ids.numpy(), token_ids(tokens, tokens))
        assert sample.metadata == {"seed": tokens}
    run.engine.close()


def test_a_reader_before_its_engine_is_told_so(master: Master) -> None:
    with pytest.raises(ForeignStore, match="run-none"):
        stagetap.open_dataset(f"mooncake://{master.address}/run-none?{SIZES}")
    with pytest.raises(Refused, match="names no run"):
        stagetap.open_dataset(f"mooncake://{master.address}")


def test_a_second_engine_of_another_kind_is_refused(run: Run) -> None:
    committer = open_store_committer(run.uri)
    with pytest.raises(Refused, match="hidden_size"):
        Engine((committer, run.engine.writer), what=tapped(hidden_size=32), run=run.name)
    committer.close()


def test_many_samples_are_consumed_once_and_leave_nothing(run: Run) -> None:
    count = 200
    for number in range(count):
        run.engine.export(f"s{number}", tokens=1 + number % 40, seed=number)
    seen = []
    with stagetap.consume(run.uri, limit=count, verify=True, stream="residual") as stream:
        for sample in stream:
            number = int(sample.sample_id[1:])
            tokens = 1 + number % 40
            assert torch.equal(sample.layer(6), states(6, tokens, number).bfloat16())
            seen.append(number)
    assert seen == list(range(count))
    assert run.keys() == []


def test_samples_arrive_while_they_are_committed(run: Run) -> None:
    with stagetap.consume(run.uri, timeout_s=5.0) as stream:
        iterator = iter(stream)
        for number in range(5):
            run.engine.export(f"s{number}")
            assert next(iterator).sample_id == f"s{number}"
        stream.finish()
    assert run.keys() == []


def test_waiting_is_bounded_and_ends_with_the_cause(run: Run) -> None:
    dataset = run.dataset()
    with pytest.raises(SampleTimeout, match="absent"):
        dataset.wait("absent", 0.3)
    run.engine.committer.record_error(run.engine.ref("bad"), 1, "the disk is on fire")
    with pytest.raises(SampleFailed, match="on fire") as caught:
        dataset.wait("bad", 5)
    assert (caught.value.stage, caught.value.cause) == (1, "the disk is on fire")
    run.engine.export("bad")
    assert dataset.wait("bad", 5).sample_id == "bad"
    timer = threading.Timer(0.3, run.engine.export, ("late",))
    timer.start()
    assert dataset.wait("late", 5).sample_id == "late"
    timer.join()


def test_a_fragment_removed_by_hand_is_named(run: Run, writer: MooncakeClient) -> None:
    made = run.engine.export("s")
    writer.remove([made.fragments[1].path], force=True)
    with pytest.raises(MissingFragment, match=r"sample 's' of run .*, stage 1 \(layers 4, 6\)"):
        run.dataset()["s"]


def test_a_flipped_byte_is_seen_when_verifying(run: Run, writer: MooncakeClient) -> None:
    made = run.engine.export("s")
    path = made.fragments[0].path
    data = bytearray(writer.get(path) or b"")
    data[11] ^= 4
    writer.remove([path], force=True)
    writer.put(path, bytes(data))
    run.dataset(verify=False)["s"]
    with pytest.raises(ChecksumMismatch, match=r"sample 's'.*stage 0 \(layers 0, 2\)"):
        run.dataset()["s"]


def test_deletion_honours_leases_and_twice_is_no_error(run: Run) -> None:
    run.engine.export("s", tokens=50)
    dataset, other = run.dataset(), run.dataset()
    held, theirs = dataset["s"], other["s"]
    dataset.delete("s")
    dataset.delete("s")
    for each in (dataset, other):
        with pytest.raises(SampleNotFound):
            each["s"]
    assert run.keys()  # leased, by the reads above
    reader = dataset._reader
    assert isinstance(reader, MooncakeStoreReader)
    reader.settle(10)
    assert run.keys() == []
    for sample in (held, theirs):
        sample.verify()
    run.engine.export("s")
    assert dataset.refresh() == 1


def test_deletion_can_be_forced(master: Master, clients: Clients) -> None:
    run = Run(master, clients, f"{SIZES}&force_remove=on")
    run.engine.export("s")
    dataset = run.dataset()
    dataset["s"].verify()
    dataset.delete("s")
    assert run.keys() == []
    run.engine.close()


@pytest.mark.parametrize("sharing", ["claim", "broadcast"])
def test_two_consumers_at_once(run: Run, sharing: str) -> None:
    count, names = 40, ("a", "b")
    got: dict[str, list[str]] = {name: [] for name in names}
    how = {"consumers": names} if sharing == "broadcast" else {}

    def consume(name: str) -> None:
        with stagetap.consume(
            run.uri,
            consumer=name,
            sharing=sharing,  # type: ignore[arg-type]
            verify=True,
            timeout_s=1.5,
            **how,  # type: ignore[arg-type]
        ) as stream:
            try:
                for sample in stream:
                    got[name].append(sample.sample_id)
            except SampleTimeout:
                stream.settle(10)
                finished.add(name)

    finished: set[str] = set()
    threads = [threading.Thread(target=consume, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for number in range(count):
        run.engine.export(f"s{number}")
    for thread in threads:
        thread.join()
    assert finished == set(names)
    expected = sorted(f"s{number}" for number in range(count))
    if sharing == "broadcast":
        assert sorted(got["a"]) == sorted(got["b"]) == expected
    else:
        assert sorted(got["a"] + got["b"]) == expected
    assert run.keys() == []


def test_a_full_store_holds_back_and_then_fails_one_sample(own_master: Master) -> None:
    run = Run(own_master, options="global_segment_size=16MiB&local_buffer_size=1MiB&space_wait=1s")
    what = run.engine.tapped
    tokens = 60_000  # 3.7 MiB a stage
    run.engine.export("first", tokens)
    run.engine.export("second", tokens)
    ref = run.engine.ref("third")
    started = time.monotonic()
    for stage in (0, 1):
        run.engine.publisher.submit(job(what, ref, stage, tokens))
    errors = [report.error or "" for report in drain(run.engine.publisher, 2)]
    assert any("no room for" in error for error in errors)
    for error in errors:
        assert error.count("lend more memory") <= 1
        assert error.count("/third/") <= 1
    assert time.monotonic() - started < 10
    # Room that comes in time is waited for.
    timer = threading.Timer(0.3, _forced(run.dataset(), "first"))
    timer.start()
    run.engine.export("third", tokens)
    timer.join()
    assert sorted(run.dataset().sample_ids) == ["second", "third"]
    run.engine.close()


def _forced(dataset: HiddenStatesDataset, sample_id: str) -> Callable[[], None]:
    reader = dataset._reader
    assert isinstance(reader, MooncakeStoreReader)
    reader._force_remove = True
    return lambda: dataset.delete(sample_id)


def test_a_dead_fragment_is_discarded(run: Run) -> None:
    made = run.engine.publish(run.engine.ref("s"), 3000)
    assert len(made.fragments[0].parts) > 1
    assert len(run.keys()) > 4
    for fragment in made.fragments:
        run.engine.committer.discard(fragment)
    assert run.keys() == []


def test_a_dataset_works_in_data_loader_workers(run: Run) -> None:
    for number in range(6):
        run.engine.export(f"s{number}", seed=number)
    dataset = stagetap.open_dataset(run.uri, verify=True)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.sample_ids == dataset.sample_ids
    rows = list(loader(dataset, "spawn"))
    assert [row.shape for row in rows] == [(7, 16)] * 6
    for number, row in enumerate(rows):
        assert torch.equal(row, states(2, 7, number).bfloat16())
    with pytest.raises(StoreError, match="spawn"):
        list(loader(dataset, "fork"))


def loader(dataset: HiddenStatesDataset, start: str) -> torch.utils.data.DataLoader[torch.Tensor]:
    return torch.utils.data.DataLoader(
        dataset,
        batch_size=None,
        num_workers=1,
        multiprocessing_context=start,
        collate_fn=_numbers,
    )


def _numbers(sample: stagetap.Sample) -> torch.Tensor:
    return sample.layer(2).clone()


def test_buffers_are_used_again(run: Run) -> None:
    for number in range(30):
        run.engine.export(f"s{number}", tokens=500, seed=number)
    with stagetap.consume(run.uri, limit=30, prefetch=2) as stream:
        for number, sample in enumerate(stream):
            assert torch.equal(sample.layer(4), states(4, 500, number).bfloat16())
            del sample
        assert stream._reader.connection.buffers.made <= 10
