"""A store as a trainer uses it: by position, by id, in workers, over ranks, resumed, live."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import stagetap
from stagetap.errors import (
    AmbiguousSample,
    MissingFragment,
    Refused,
    SampleFailed,
    SampleNotFound,
    SampleTimeout,
    StageTapError,
)
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.reader.sample import Sample
from store_samples import RUN, Engine, states, token_ids

COUNT = 11
IDS = [f"s{number}" for number in range(COUNT)]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eleven samples of different lengths. Not to be written to."""
    root = tmp_path_factory.mktemp("stored") / "store"
    engine = Engine(root)
    for number, sample_id in enumerate(IDS):
        engine.export(sample_id, tokens=3 + number, seed=number)
    engine.close()
    return root


@pytest.fixture
def dataset(stored: Path) -> HiddenStatesDataset:
    return stagetap.open_dataset(stored)


def ids(samples: Any) -> list[str]:
    return [sample.sample_id for sample in samples]


def check(sample: Sample) -> str:
    """Compare a sample with what was stored under its id; a collate_fn."""
    number = int(sample.sample_id[1:])
    tokens = 3 + number
    expected = torch.stack([states(k, tokens, number) for k in (2, 0, 4)], dim=1).bfloat16()
    assert torch.equal(sample.hidden_states, expected)
    assert sample.last_hidden_states is not None
    assert torch.equal(sample.last_hidden_states, states(6, tokens, number).bfloat16())
    assert torch.equal(sample.input_ids, torch.from_numpy(token_ids(tokens, number)))
    assert sample.metadata == {"seed": number}
    return sample.sample_id


# By position and by id


def test_by_position_by_id_and_in_a_row(dataset: HiddenStatesDataset) -> None:
    assert len(dataset) == COUNT
    assert dataset.sample_ids == IDS
    assert all(name in dataset for name in IDS)
    assert "nosuch" not in dataset
    with pytest.raises(TypeError, match="only a sample id"):
        assert dataset[0] in dataset
    assert [check(sample) for sample in dataset] == IDS
    assert [check(dataset[number]) for number in range(COUNT)] == IDS
    assert [check(dataset[sample_id]) for sample_id in reversed(IDS)] == IDS[::-1]
    assert check(dataset[-1]) == IDS[-1]
    assert check(dataset[torch.tensor(4)]) == "s4"  # type: ignore[index]
    assert dataset.manifest("s3") == dataset["s3"].manifest
    assert dataset.invariant.layer_ids == (2, 0, 4, 6)


@pytest.mark.parametrize("position", [COUNT, -COUNT - 1, 10**9])
def test_a_position_beyond_the_end(dataset: HiddenStatesDataset, position: int) -> None:
    with pytest.raises(IndexError, match="of a dataset of 11 samples"):
        dataset[position]


def test_an_id_that_is_not_there(dataset: HiddenStatesDataset) -> None:
    with pytest.raises(SampleNotFound, match="sample 'nobody' is not committed here") as caught:
        dataset["nobody"]
    assert caught.value.sample_id == "nobody"
    assert isinstance(caught.value, KeyError)


def test_writing_to_a_sample_changes_no_file(stored: Path, dataset: HiddenStatesDataset) -> None:
    dataset[0].layer(2).zero_()
    dataset[0].input_ids.zero_()
    check(stagetap.open_dataset(stored, verify=True)[0])


def test_an_empty_store_is_an_empty_dataset(root: Path) -> None:
    Engine(root).close()
    dataset = stagetap.open_dataset(root)
    assert len(dataset) == 0
    assert list(dataset) == list(dataset.stream()) == []
    with pytest.raises(IndexError):
        dataset[0]


def test_ids_that_repeat_in_another_run_are_kept_apart(root: Path) -> None:
    for seed, run in enumerate(("monday", "tuesday")):
        engine = Engine(root, run=run)
        engine.export("0", tokens=4, seed=seed)
        engine.close()
    both = stagetap.open_dataset(root)
    assert both.sample_ids == ["0", "0"]
    with pytest.raises(AmbiguousSample, match="runs monday, tuesday"):
        both["0"]
    with pytest.raises(AmbiguousSample):
        both.delete("0")
    for seed, run in enumerate(("monday", "tuesday")):
        one = stagetap.open_dataset(root, run=run)
        assert one["0"].metadata == {"seed": seed}
        assert len(one) == 1
    # It may begin yet, so it is no mistake for sure.
    with pytest.warns(UserWarning, match="has no run 'sunday' yet; it has monday, tuesday"):
        assert len(stagetap.open_dataset(root, run="sunday")) == 0
    both.delete(0)
    assert stagetap.open_dataset(root)["0"].metadata == {"seed": 1}


# DataLoader, ranks


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_loader_gives_each_sample_once(
    dataset: HiddenStatesDataset, num_workers: int
) -> None:
    by_position = DataLoader(dataset, batch_size=None, num_workers=num_workers)
    assert [check(sample) for sample in by_position] == IDS
    in_worker = DataLoader(dataset.stream(), None, num_workers=num_workers, collate_fn=check)
    assert list(in_worker) == IDS
    assert list(in_worker) == IDS
    batches = DataLoader(dataset, batch_size=4, num_workers=num_workers, collate_fn=ids)
    assert list(batches) == [IDS[:4], IDS[4:8], IDS[8:]]
    assert list(dataset.stream().loader(num_workers, check)) == IDS


def test_workers_that_are_spawned_get_the_dataset_by_pickle(dataset: HiddenStatesDataset) -> None:
    again = pickle.loads(pickle.dumps(dataset))
    assert [check(sample) for sample in again] == IDS
    stream = pickle.loads(pickle.dumps(dataset.stream()))
    assert ids(stream) == IDS


@pytest.mark.parametrize("world_size", [1, 2, 3, 20])
def test_over_all_ranks_each_sample_comes_once(
    dataset: HiddenStatesDataset, world_size: int
) -> None:
    shards = [dataset.shard(rank, world_size) for rank in range(world_size)]
    seen = [ids(shard) for shard in shards]
    assert sorted(chain(*seen)) == sorted(IDS)
    assert max(map(len, seen)) - min(map(len, seen)) <= 1
    for rank, shard in enumerate(shards):
        assert shard.sample_ids == seen[rank]
        assert len(shard) == len(seen[rank])
        assert ids(shard[position] for position in range(len(shard))) == seen[rank]
        assert ids(dataset.stream(rank, world_size)) == seen[rank]


def test_three_ranks_with_two_workers_each(dataset: HiddenStatesDataset) -> None:
    seen = [list(dataset.stream(rank, 3).loader(2, check)) for rank in range(3)]
    assert sorted(chain(*seen)) == sorted(IDS)


@pytest.mark.parametrize(("rank", "world_size"), [(3, 3), (-1, 3), (0, 0), (1, 1)])
def test_ranks_that_do_not_exist_are_refused(
    dataset: HiddenStatesDataset, rank: int, world_size: int
) -> None:
    for make in (dataset.shard, dataset.stream):
        with pytest.raises(Refused, match=r"ranks count from 0|world_size 0"):
            make(rank, world_size)
    with pytest.raises(Refused, match="shard the whole"):
        dataset.shard(0, 2).shard(0, 2)


# Resuming


@pytest.mark.parametrize(
    ("consumed", "workers_before", "workers_after"),
    [(0, 0, 0), (1, 0, 0), (5, 0, 0), (COUNT, 0, 0), (3, 2, 0), (2, 0, 2), (3, 2, 2), (5, 2, 2)],
)
def test_a_loader_resumes_with_any_number_of_workers(
    dataset: HiddenStatesDataset,
    stored: Path,
    consumed: int,
    workers_before: int,
    workers_after: int,
) -> None:
    loader = dataset.stream(1, 2).loader(workers_before)
    mine = ids(dataset.shard(1, 2))
    seen = []
    for _, sample in zip(range(min(consumed, len(mine))), loader, strict=False):
        seen.append(sample.sample_id)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = stagetap.open_dataset(stored).stream(1, 2).loader(workers_after)
    resumed.load_state_dict(state)
    rest = ids(resumed)
    assert seen + rest == mine
    assert ids(resumed) == mine  # the next epoch is whole


def test_a_stream_resumes_by_itself(dataset: HiddenStatesDataset, stored: Path) -> None:
    stream = dataset.stream()
    passing = iter(stream)
    seen = [next(passing).sample_id for _ in range(5)]
    state = json.loads(json.dumps(stream.state_dict()))
    resumed = stagetap.open_dataset(stored).stream()
    resumed.load_state_dict(state)
    assert seen + ids(resumed) == IDS
    assert ids(resumed) == IDS
    assert ids(stream) == IDS  # a new pass starts at the beginning


@pytest.mark.parametrize("through_loader", [False, True])
def test_every_pass_but_a_resumed_one_is_whole(
    dataset: HiddenStatesDataset, stored: Path, through_loader: bool
) -> None:
    def source() -> Any:
        stream = stagetap.open_dataset(stored).stream()
        return stream.loader() if through_loader else stream

    first = source()
    passing = iter(first)
    for _ in range(3):
        next(passing)
    resumed = source()
    resumed.load_state_dict(first.state_dict())
    assert next(iter(resumed)).sample_id == "s3"
    assert ids(resumed) == IDS  # the resumed pass was left, this is another one
    after_the_end = source()
    after_the_end.load_state_dict(resumed.state_dict())
    assert ids(after_the_end) == IDS


@pytest.mark.parametrize("through_loader", [False, True])
def test_a_sample_that_could_not_be_read_is_not_skipped_by_resuming(
    root: Path, through_loader: bool
) -> None:
    engine = Engine(root)
    made = [engine.export(sample_id, tokens=3) for sample_id in "abc"]
    engine.close()
    path = root / made[1].fragments[0].path
    path.rename(root.with_name("aside"))

    def source() -> Any:
        stream = stagetap.open_dataset(root).stream()
        return stream.loader() if through_loader else stream

    broken = source()
    passing = iter(broken)
    assert next(passing).sample_id == "a"
    with pytest.raises(MissingFragment):
        next(passing)
    root.with_name("aside").rename(path)
    resumed = source()
    resumed.load_state_dict(broken.state_dict())
    assert ids(resumed) == ["b", "c"]


KILLED = """
import json, os, sys
import stagetap
dataset = stagetap.open_dataset(sys.argv[1])
loader = dataset.stream(0, 2).loader(num_workers=2)
if os.path.exists(sys.argv[2]):
    loader.load_state_dict(json.load(open(sys.argv[2])))
for number, sample in enumerate(loader, 1):
    print(sample.sample_id, flush=True)
    json.dump(loader.state_dict(), open(sys.argv[2] + ".new", "w"))
    os.replace(sys.argv[2] + ".new", sys.argv[2])
    if number == 2:
        sys.stdin.read(1)
"""


def test_a_trainer_that_is_killed_goes_on_where_it_stood(stored: Path, tmp_path: Path) -> None:
    path = f"import sys; sys.path[:0] = {[p for p in sys.path if p]!r}\n"
    arguments = [sys.executable, "-c", path + KILLED, str(stored), str(tmp_path / "state.json")]
    process = subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    first = [process.stdout.readline().strip() for _ in range(2)]
    deadline = time.monotonic() + 30
    while '"position":2' not in _state(tmp_path).replace(" ", ""):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    second = subprocess.run(
        arguments, input="\n", capture_output=True, text=True, timeout=60, check=True
    )
    assert first + second.stdout.split() == IDS[::2]


def _state(directory: Path) -> str:
    path = directory / "state.json"
    return path.read_text() if path.exists() else ""


def test_a_state_holds_on_a_store_that_was_written_to_and_deleted_from(root: Path) -> None:
    engine = Engine(root)
    for number in range(6):
        engine.export(f"s{number}", tokens=3)
    dataset = stagetap.open_dataset(root)
    stream = dataset.stream(1, 2)
    passing = iter(stream)
    seen = [next(passing).sample_id for _ in range(2)]
    state = stream.state_dict()
    for done in ("s0", *seen):
        dataset.delete(done)
    engine.export("s6", tokens=3)
    engine.close()
    later = stagetap.open_dataset(root)
    assert later.sample_ids == ["s2", "s4", "s5", "s6"]
    resumed = later.stream(1, 2)
    resumed.load_state_dict(state)
    assert seen + ids(resumed) == ["s1", "s3", "s5"]
    later.refresh()
    assert "s6" in later.sample_ids


def test_ranks_that_open_a_live_store_apart_take_one_order(root: Path) -> None:
    engine = Engine(root)
    other = Engine(root)
    for number in range(4):
        engine.export(f"a{number}", tokens=3)
    first = stagetap.open_dataset(root)
    other.export("b", tokens=3)
    second = stagetap.open_dataset(root)
    assert len(first) != len(second)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.sample_ids == first.sample_ids
    seen = ids(first.shard(0, 2)) + ids(second.shard(1, 2))
    assert sorted(seen) == first.sample_ids
    engine.close()
    other.close()


def test_a_state_that_does_not_fit_is_refused(dataset: HiddenStatesDataset, root: Path) -> None:
    state = dataset.stream(0, 2).state_dict()
    with pytest.raises(Refused, match="same number of ranks"):
        dataset.stream(1, 2).load_state_dict(state)
    with pytest.raises(Refused, match="same number of ranks"):
        dataset.stream().load_state_dict(state)
    with pytest.raises(Refused, match="not a state"):
        dataset.stream().load_state_dict({"position": 3})
    whole = dataset.stream().state_dict()
    with pytest.raises(Refused, match="stands at 99 of 11"):
        dataset.stream().load_state_dict(whole | {"position": 99})
    with pytest.raises(Refused, match="version"):
        dataset.stream().load_state_dict(whole | {"version": 2})
    with pytest.raises(Refused, match="worker 1 of 2"):
        dataset.stream().load_state_dict(whole | {"worker": 1, "workers": 2})
    Engine(root).close()
    with pytest.raises(Refused, match="another store"):
        stagetap.open_dataset(root).stream().load_state_dict(whole)


def test_a_state_that_this_process_cannot_know_is_not_made_up(
    dataset: HiddenStatesDataset,
) -> None:
    stream = dataset.stream()
    assert ids(DataLoader(stream, batch_size=None, num_workers=1)) == IDS
    with pytest.raises(StageTapError, match=r"stream\.loader"):
        stream.state_dict()


def test_workers_do_not_resume_every_epoch(
    dataset: HiddenStatesDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = dataset.stream()
    stream.load_state_dict(stream.state_dict())
    # As a worker sees it: another process, with a copy of the stream.
    monkeypatch.setattr(
        "stagetap.reader.stream.get_worker_info", lambda: SimpleNamespace(id=0, num_workers=1)
    )
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(StageTapError, match=r"stream\.loader"):
        iter(stream)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stateful_data_loader_of_torchdata(stored: Path, num_workers: int) -> None:
    stateful = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="torchdata, which nothing else needs, is not here"
    )

    def loader() -> Any:
        stream = stagetap.open_dataset(stored).stream()
        return stateful.StatefulDataLoader(stream, batch_size=None, num_workers=num_workers)

    first = loader()
    passing = iter(first)
    seen = [next(passing).sample_id for _ in range(5)]
    state = first.state_dict()
    del passing
    second = loader()
    second.load_state_dict(state)
    assert seen + ids(second) == IDS


# Live stores


def test_a_refresh_appends(root: Path) -> None:
    engine = Engine(root)
    engine.export("a")
    dataset = stagetap.open_dataset(root)
    shard = dataset.shard(1, 2)
    engine.export("b")
    assert dataset.sample_ids == ["a"]
    assert dataset.refresh() == 1
    assert dataset.sample_ids == ["a", "b"]
    assert shard.sample_ids == ["b"]
    assert dataset.refresh() == 0
    engine.close()


def test_waiting_for_a_sample(root: Path) -> None:
    engine = Engine(root)
    dataset = stagetap.open_dataset(root)
    timer = threading.Timer(0.2, lambda: engine.export("late"))
    timer.start()
    assert dataset.wait("late", timeout_s=20).sample_id == "late"
    timer.join()
    assert dataset.wait("late", timeout_s=0).sample_id == "late"
    started = time.monotonic()
    with pytest.raises(SampleTimeout, match=r"sample 'never' was not committed within 0\.3 s"):
        dataset.wait("never", timeout_s=0.3)
    assert 0.3 <= time.monotonic() - started < 5
    engine.close()


@pytest.mark.parametrize("run", [None, RUN])
def test_waiting_for_a_sample_that_failed(root: Path, run: str | None) -> None:
    engine = Engine(root)
    dataset = stagetap.open_dataset(root, run=run)
    first = engine.ref("s")
    engine.committer.record_error(first, 1, "the disk is full")
    with pytest.raises(SampleFailed, match="failed on stage 1: the disk is full") as caught:
        dataset.wait("s", timeout_s=20)
    assert (caught.value.cause, caught.value.stage) == ("the disk is full", 1)
    # A second attempt is under way: that the first one failed says nothing any more.
    second = engine.publish(engine.ref("s"), 5)
    with pytest.raises(SampleTimeout):
        dataset.wait("s", timeout_s=0.1)
    engine.committer.commit(second)
    assert dataset.wait("s", timeout_s=20).manifest == second
    engine.close()


def test_deleting_after_reading(root: Path) -> None:
    engine = Engine(root)
    for number in range(5):
        engine.export(f"s{number}", tokens=4, seed=number)
    dataset = stagetap.open_dataset(root)
    for sample in dataset.stream():
        before = sample.layer(2).clone()
        dataset.delete(sample.sample_id)
        dataset.delete(sample.sample_id)  # the second time is no error
        assert torch.equal(sample.layer(2), before)  # what is held stays readable
    assert not (root / RUN).exists()
    with pytest.raises(SampleNotFound, match="'s3' is deleted"):
        dataset["s3"]
    with pytest.raises(SampleNotFound, match="deleted"):
        dataset[3]
    fresh = stagetap.open_dataset(root)
    assert len(fresh) == 0
    fresh.delete("s3")
    with pytest.raises(SampleNotFound, match="never committed"):
        fresh.delete("s9")
    assert len(list((root / "deletes").iterdir())) == 1  # one log, however many were deleted
    engine.close()


def test_deleting_leaves_what_is_not_ours(root: Path) -> None:
    engine = Engine(root)
    made = engine.export("s")
    notes = (root / made.fragments[0].path).with_name("notes.txt")
    notes.write_text("mine")
    stagetap.open_dataset(root).delete("s")
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]
    engine.close()


def test_a_sample_that_another_trainer_deleted_says_so(root: Path) -> None:
    engine = Engine(root)
    engine.export("s")
    ours, theirs = stagetap.open_dataset(root), stagetap.open_dataset(root)
    theirs.delete("s")
    with pytest.raises(SampleNotFound, match="'s' is deleted"):
        ours["s"]
    ours.delete("s")
    engine.close()


def test_deleting_takes_the_other_commits_of_a_race_along(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = Engine(root), Engine(root)
    first, second = (each.publish(each.ref("s"), 5) for each in (engine, other))
    engine.committer.commit(first)
    monkeypatch.setattr(other.committer, "_poll", lambda: None)
    other.committer.commit(second)
    stagetap.open_dataset(root).delete("s")
    assert len(stagetap.open_dataset(root)) == 0
    assert not (root / RUN).exists()
    monkeypatch.undo()
    engine.close()
    other.close()


def test_deletions_in_forked_workers_do_not_share_a_log(root: Path) -> None:
    engine = Engine(root)
    for number in range(6):
        engine.export(f"s{number}")
    dataset = stagetap.open_dataset(root)
    dataset.delete("s0")

    def delete(sample: Sample) -> str:
        dataset.delete(sample.sample_id)
        return sample.sample_id

    fresh = stagetap.open_dataset(root)
    deleted = list(fresh.stream().loader(2, delete))
    assert deleted == [f"s{number}" for number in range(1, 6)]
    assert len(stagetap.open_dataset(root)) == 0
    assert len(list((root / "deletes").iterdir())) == 3
    engine.close()
