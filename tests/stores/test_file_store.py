"""The writing side of the file store: what is committed is whole, durable and of one kind."""

import dataclasses
import json
import multiprocessing
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import stagetap
from stagetap.errors import (
    DuplicateSample,
    MalformedManifest,
    StoreError,
)
from stagetap.publish.publisher import Gather, Publisher
from stagetap.stores.base import (
    FragmentHeader,
    SampleRef,
    open_store_reader,
)
from store_samples import (
    RUN,
    Engine,
    drain,
    files,
    job,
    manifest,
    owned,
    states,
    tapped,
    token_ids,
    visible,
)

AWKWARD_IDS = [
    "a/b",
    "a_b",
    "a%2Fb",
    "..",
    ".",
    ".hidden",
    "commit",
    "commits",
    "stagetap.json",
    "error.0",
    ".stagetap.x",
    "with space",
    "new\nline",
    "nul\0",
    "é" * 100,
    "e\u0301" * 100,
    "x" * 3000 + "1",
    "x" * 3000 + "2",
    "A",
    "a",
]


def header(ref: SampleRef, tokens: int = 4, stage: int = 1) -> FragmentHeader:
    return FragmentHeader(
        ref=ref,
        stage=stage,
        layers=owned(tapped(), stage),
        dtype="bfloat16",
        shape=(tokens, 2, 16),
        token_ids=None,
    )


def test_four_samples_of_eight_slots_each_pass_through_two_slots_at_once(root: Path) -> None:
    what = tapped()
    row_bytes = 2 * 16 * 2
    tokens = 8 * 4  # eight slots of four rows
    engine = Engine(root, what)
    publisher = Publisher(
        engine.writer, slots=2, slot_bytes=4 * row_bytes, writer_threads=4, refuse_nonfinite=True
    )
    refs = [engine.ref(f"s{number}") for number in range(4)]
    # The first two go on only once both of them, and so both slots, are taken.
    both_taken = threading.Barrier(2)

    def after_both(source: Gather) -> Gather:
        def gather(start: int, end: int, out: torch.Tensor) -> None:
            if start == 0:
                both_taken.wait(10)
            source(start, end, out)

        return gather

    jobs = [
        job(what, ref, stage, tokens, seed) for stage in (0, 1) for seed, ref in enumerate(refs)
    ]
    for number, each in enumerate(jobs):
        gather = after_both(each.gather) if number < 2 else each.gather
        publisher.submit(dataclasses.replace(each, gather=gather))
    reports = drain(publisher, 8)
    assert [report.error for report in reports] == [None] * 8
    assert publisher.pool.in_use == 0
    assert publisher.pool.waited_seconds > 0
    for seed, ref in enumerate(refs):
        fragments = [r.fragment for r in reports if r.ref == ref and r.fragment]
        engine.committer.commit(manifest(what, ref, fragments, tokens, seed))
    assert publisher.shutdown(10) == []
    engine.close()
    dataset = stagetap.open_dataset(root, verify=True)
    assert dataset.sample_ids == ["s0", "s1", "s2", "s3"]
    for seed, sample in enumerate(dataset):
        for k in what.layer_ids:
            assert torch.equal(sample.layer(k), states(k, tokens, seed).bfloat16())
        assert np.array_equal(sample.input_ids.numpy(), token_ids(tokens, seed))


def test_durable_in_order_fragment_then_its_directories_then_commit(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(root)
    engine.export("first")  # makes the run's directory
    events: list[str] = []
    real_fsync, real_rename, real_write = os.fsync, os.rename, os.write

    def name_of(fd: int) -> str:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return "fragment" if ".stagetap." in path.name else path.suffix.lstrip(".") or path.name

    def fsync(fd: int) -> None:
        real_fsync(fd)
        events.append(f"fsync {name_of(fd)}")

    def rename(source: str, target: str) -> None:
        real_rename(source, target)
        events.append(f"rename {Path(target).name}")

    def write(fd: int, data: Any) -> int:
        events.append(f"write {name_of(fd)}")
        return real_write(fd, data)

    ref = engine.ref("second")
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "write", write)
    engine.publisher.submit(job(engine.tapped, ref, 0, 5))
    first = drain(engine.publisher, 1)
    engine.publisher.submit(job(engine.tapped, ref, 1, 5))
    second = drain(engine.publisher, 1)
    fragments = [report.fragment for report in first + second if report.fragment]
    written = len(events)
    engine.committer.commit(manifest(engine.tapped, ref, fragments, 5))
    monkeypatch.undo()

    def fragment_events(stage: int) -> list[str]:
        return [
            "write fragment",
            "write fragment",
            "fsync fragment",
            f"rename {stage}.safetensors",
            f"fsync {ref.attempt}",
            "fsync second",
            f"fsync {RUN}",
        ]

    assert events[:written] == fragment_events(0) + fragment_events(1)
    assert events[written:] == ["write jsonl", "fsync jsonl"]
    engine.close()


def test_the_first_fragment_of_a_run_makes_the_runs_name_durable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(root)
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        real_fsync(fd)
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))

    monkeypatch.setattr(os, "fsync", fsync)
    engine.publish(engine.ref("s"), 3)
    monkeypatch.undo()
    assert str(root) in synced
    engine.close()


def test_a_fragment_is_a_plain_aligned_safetensors_file(root: Path, engine: Engine) -> None:
    for tokens in (1, 7, 8, 33):
        made = engine.export(f"s{tokens}", tokens)
        for fragment in made.fragments:
            path = root / fragment.path
            assert path.stat().st_size == fragment.file_bytes
            with safe_open(path, framework="pt") as file:
                assert ("input_ids" in file.keys()) == fragment.input_ids  # noqa: SIM118
                tensor = file.get_tensor("hidden_states")
                assert file.metadata()["sample_id"] == f"s{tokens}"
            expected = [states(layer.id, tokens).bfloat16() for layer in fragment.layers]
            assert torch.equal(tensor, torch.stack(expected, dim=1))
            assert (path.stat().st_size - fragment.byte_size) % 64 == 0


def test_awkward_ids_are_samples_of_their_own(root: Path, engine: Engine) -> None:
    for seed, sample_id in enumerate(AWKWARD_IDS):
        engine.export(sample_id, tokens=3, seed=seed)
    dataset = stagetap.open_dataset(root, verify=True)
    assert dataset.sample_ids == AWKWARD_IDS
    for seed, sample_id in enumerate(AWKWARD_IDS):
        sample = dataset[sample_id]
        assert sample.sample_id == sample_id
        assert torch.equal(sample.layer(2), states(2, 3, seed).bfloat16())
    inside = {path.resolve().is_relative_to(root.resolve()) for path in root.rglob("*")}
    assert inside == {True}
    assert {path.name for path in root.iterdir()} == {
        "commits", "deletes", "nonces", RUN, "stagetap.json",
    }  # fmt: skip


@pytest.mark.parametrize("rows", [3, 5])
def test_a_fragment_that_is_not_of_its_shape_is_no_fragment(
    root: Path, engine: Engine, rows: int
) -> None:
    before = files(root)
    writer = engine.writer.open_fragment(header(engine.ref("s"), tokens=4))

    def write_and_finish() -> None:
        writer.write([memoryview(bytes(64 * rows))])
        writer.finish()

    with pytest.raises(StoreError, match=r"64 bytes (fewer|more) than its shape"):
        write_and_finish()
    writer.abort()
    assert files(root) == before


def test_an_attempt_is_not_written_twice(engine: Engine) -> None:
    ref = engine.ref("s")
    engine.publish(ref, 4)
    with pytest.raises(StoreError, match="attempt id was used twice"):
        engine.writer.open_fragment(header(ref))


def test_a_committed_sample_is_not_committed_again(root: Path, engine: Engine) -> None:
    engine.export("s")
    assert engine.committer.is_committed(RUN, "s")
    assert not engine.committer.is_committed("other-run", "s")
    with pytest.raises(DuplicateSample, match="sample 's' of run 'run-1' is committed already"):
        engine.export("s")
    other = Engine(root)
    assert other.committer.is_committed(RUN, "s")
    with pytest.raises(DuplicateSample):
        other.export("s")
    other.close()


def test_a_commit_of_another_engine_is_seen_while_both_run(root: Path, engine: Engine) -> None:
    other = Engine(root)
    assert not other.committer.is_committed(RUN, "s")
    engine.export("s")
    assert other.committer.is_committed(RUN, "s")
    other.close()


def test_a_deleted_sample_may_come_again(root: Path, engine: Engine) -> None:
    engine.export("s", seed=1)
    stagetap.open_dataset(root).delete("s")
    assert not engine.committer.is_committed(RUN, "s")
    engine.export("s", seed=2)
    sample = stagetap.open_dataset(root, verify=True)["s"]
    assert torch.equal(sample.layer(2), states(2, 7, 2).bfloat16())


def test_of_two_commits_in_a_race_the_earliest_counts(
    root: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Engine(root)
    ours, theirs = engine.ref("s"), SampleRef(run_id=RUN, sample_id="s", attempt="theirs")
    first, second = engine.publish(ours, 5, seed=1), other.publish(theirs, 6, seed=2)
    engine.committer.commit(first)
    # The other one has looked just before the first commit.
    monkeypatch.setattr(other.committer, "_poll", lambda: None)
    other.committer.commit(second)
    other.close()
    dataset = stagetap.open_dataset(root, verify=True)
    assert dataset.sample_ids == ["s"]
    assert dataset["s"].manifest.attempt == first.attempt


def test_a_manifest_of_another_kind_is_not_committed(root: Path, engine: Engine) -> None:
    made = engine.publish(engine.ref("s"), 5)
    changed = type(made)(**{
        **{field: getattr(made, field) for field in made.__struct_fields__},
        "tapped": tapped(weights_fingerprint="sha256:other"),
    })  # fmt: skip
    with pytest.raises(MalformedManifest, match="weights_fingerprint is sha256:other"):
        engine.committer.commit(changed)
    assert visible(root) == []


def test_a_failed_attempt_leaves_its_cause_and_a_retry_works(root: Path, engine: Engine) -> None:
    ref = engine.ref("s")
    engine.publish(ref, 5)
    engine.committer.record_error(ref, 1, "the disk\nis full")
    engine.committer.record_error(ref, None, "gave up")
    assert visible(root) == []
    failures = open_store_reader(root).failures(None, "s")
    causes = {(failure.stage, failure.cause) for failure in failures}
    assert causes == {(1, "the disk\nis full"), (None, "gave up")}
    record = json.loads((root / RUN / "s" / ref.attempt / "error.1.json").read_text())
    assert record["cause"] == "the disk\nis full"
    engine.export("s", 5)
    assert visible(root) == ["s"]
    assert open_store_reader(root).failures(None, "s") == []


def _export_many(root: Path, name: str, start: Any) -> None:
    engine = Engine(root, run=RUN)
    start.wait(30)
    for number in range(15):
        engine.export(f"{name}-{number}", tokens=3)
    engine.close()


def test_two_engines_write_to_one_store_at_once(root: Path) -> None:
    context = multiprocessing.get_context("fork")
    start = context.Barrier(2)
    processes = [
        context.Process(target=_export_many, args=(root, name, start)) for name in ("a", "b")
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    dataset = stagetap.open_dataset(root, verify=True)
    assert sorted(dataset.sample_ids) == sorted(f"{n}-{i}" for n in "ab" for i in range(15))
    times = [(e.committed_at_ns, e.writer, e.line) for e in dataset.entries]
    assert times == sorted(times)
    assert len(list(dataset)) == 30
