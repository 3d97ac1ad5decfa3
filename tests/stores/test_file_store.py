"""The writing side of the file store: what is committed is whole, durable and of one kind."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors import safe_open

import stagetap
from stagetap.errors import (
    DuplicateSample,
    ForeignStore,
    MalformedManifest,
    Refused,
    StoreError,
    UnknownVersion,
)
from stagetap.publish.publisher import Gather, Publisher
from stagetap.stores.base import (
    FragmentHeader,
    KnownKind,
    SampleRef,
    check_store,
    open_store_committer,
    open_store_reader,
    open_store_writer,
)
from stagetap.stores.file_committer import FileStoreCommitter
from stagetap.stores.file_verify import verify_store
from stagetap.stores.file_writer import FileStoreWriter
from stagetap.stores.kind import kind_of
from store_samples import RUN, Engine, drain, job, manifest, owned, states, tapped, token_ids
from tmpfs import Tmpfs

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


def visible(root: Path) -> list[str]:
    return stagetap.open_dataset(root, verify=True).sample_ids


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


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


def test_an_fsync_that_hangs_holds_up_nobody_who_only_looks(
    root: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.export("before", 3)
    begun, thaw = threading.Event(), threading.Event()
    fsync = os.fsync

    def frozen(fd: int) -> None:
        if threading.current_thread().name == "commit":
            begun.set()
            assert thaw.wait(30)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", frozen)
    prepared = engine.publish(engine.ref("frozen"), 3)
    thread = threading.Thread(target=engine.committer.commit, args=(prepared,), name="commit")
    thread.start()
    try:
        assert begun.wait(30)
        assert engine.committer.is_committed(engine.run, "before")
        # Its line may be in the file, but it is not durable.
        assert not engine.committer.is_committed(engine.run, "frozen")
    finally:
        thaw.set()
        thread.join(30)
    assert engine.committer.is_committed(engine.run, "frozen")


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


def test_a_fragment_whose_name_is_not_durable_is_removed_under_that_name_too(
    root: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = engine.ref("s")
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(ref.attempt):
            failing(5)()
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    engine.publisher.submit(job(engine.tapped, ref, 1, 5))
    (report,) = drain(engine.publisher, 1)
    assert report.error is not None
    assert "cannot make durable" in report.error
    assert list((root / RUN / "s" / ref.attempt).iterdir()) == []


def test_an_attempt_is_not_written_twice(engine: Engine) -> None:
    ref = engine.ref("s")
    engine.publish(ref, 4)
    with pytest.raises(StoreError, match="attempt id was used twice"):
        engine.writer.open_fragment(header(ref))


# Kinds of data


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float32"}, "dtype bfloat16, .* would write float32"),
        ({"weights_fingerprint": "sha256:other"}, "weights_fingerprint sha256:abab.* sha256:other"),
        ({"layer_ids": (0, 2, 4, 6)}, r"layer_ids \[2, 0, 4, 6\], .* \[0, 2, 4, 6\]"),
        ({"stream": "attn_res_mixture"}, "stream residual, .* attn_res_mixture"),
        ({"hidden_size": 32}, "hidden_size 16, .* 32"),
        ({"engine_args": {"kv_cache_dtype": "fp8"}}, r"engine_args .*kv_cache_dtype"),
    ],
)
def test_another_kind_of_data_in_one_store_is_refused(
    root: Path, changes: dict[str, Any], named: str
) -> None:
    Engine(root).close()
    with pytest.raises(Refused, match=named + ".*another directory"):
        Engine(root, tapped(**changes))
    assert visible(root) == []


def test_another_layout_of_the_same_model_shares_the_store(root: Path) -> None:
    for number, layout in enumerate([((0, 6),), ((0, 3), (3, 6)), ((0, 1), (1, 1), (1, 6))]):
        engine = Engine(root, tapped(pp_layers=layout), run=f"run-{number}")
        engine.export(f"s{number}", tokens=4)
        engine.close()
    dataset = stagetap.open_dataset(root, verify=True)
    assert dataset.sample_ids == ["s0", "s1", "s2"]
    assert all(torch.equal(s.hidden_states, dataset[0].hidden_states) for s in dataset)


def test_of_two_engines_that_claim_at_once_one_wins(root: Path) -> None:
    outcomes: list[str] = []
    together = threading.Barrier(8)

    def claim(dtype: str) -> None:
        committer = FileStoreCommitter(str(root))
        what = tapped(dtype=dtype)
        together.wait()
        try:
            committer.begin_run(kind_of(what))
            outcomes.append(dtype)
        except Refused:
            outcomes.append("refused")
        committer.close()

    dtypes = ["float16", "bfloat16"] * 4
    threads = [threading.Thread(target=claim, args=(dtype,)) for dtype in dtypes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes).count("refused") == 4
    assert len(set(outcomes)) == 2
    assert open_store_reader(root).invariant.dtype in outcomes


REF = SampleRef(run_id="r", sample_id="s", attempt="a")


def test_a_directory_of_somebody_else_is_refused(root: Path) -> None:
    root.mkdir()
    (root / "thesis.tex").write_text("mine")
    with pytest.raises(Refused, match=r"holds other things \(thesis.tex\)"):
        Engine(root)
    assert files(root) == {"thesis.tex"}
    with pytest.raises(ForeignStore, match=r"no stagetap\.json"):
        stagetap.open_dataset(root)


def test_a_start_that_was_killed_before_its_claim_does_no_harm(root: Path) -> None:
    for name in ("commits", "deletes", "nonces", "lost+found"):
        (root / name).mkdir(parents=True)
    (root / ".stagetap.stagetap.json.123").write_text("half")
    Engine(root).close()


@pytest.mark.parametrize("text", ["", "{}", "[1", '{"store_version":1,"dtype":3}', "\udcff"])
def test_a_claim_that_is_damaged_is_named(root: Path, text: str) -> None:
    Engine(root).close()
    (root / "stagetap.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ForeignStore, match=r"stagetap\.json was not written by StageTap"):
        stagetap.open_dataset(root)
    with pytest.raises(ForeignStore):
        Engine(root)


def test_a_store_of_another_version_is_named(root: Path) -> None:
    Engine(root).close()
    (root / "stagetap.json").write_text('{"store_version": 2, "something": "else"}')
    with pytest.raises(UnknownVersion, match="store_version is 2"):
        stagetap.open_dataset(root)


@pytest.mark.parametrize("uri", ["mooncake://host:1", "s3://bucket", "", "file://host/x"])
@pytest.mark.parametrize("open_store", [open_store_reader, open_store_writer, open_store_committer])
def test_addresses_that_lead_nowhere_are_refused(uri: str, open_store: Any) -> None:
    with pytest.raises(Refused):
        open_store(uri)


def test_an_address_may_be_a_path_or_a_file_uri(root: Path, engine: Engine) -> None:
    engine.export("s")
    for uri in (root, str(root), f"file://{root}", os.path.relpath(root)):
        assert stagetap.open_dataset(uri).sample_ids == ["s"]


# One shared directory


def test_a_worker_reads_the_schedulers_nonce_in_a_shared_directory_only(
    tmp_path: Path, root: Path, engine: Engine
) -> None:
    elsewhere = FileStoreWriter(str(tmp_path / "elsewhere"))
    assert elsewhere.read_nonces() == []
    second = FileStoreCommitter(str(root))
    second.leave_nonce("another/nonce")
    assert sorted(engine.writer.read_nonces()) == ["another/nonce", f"nonce-{RUN}"]
    second.close()
    assert engine.writer.read_nonces() == [f"nonce-{RUN}"]


def test_a_nonce_of_an_engine_that_starts_is_not_swept(root: Path) -> None:
    Engine(root).close()
    starting = FileStoreCommitter(str(root))
    starting.leave_nonce("nonce")
    with pytest.raises(Refused, match="in use"):
        verify_store(root, gc=True)
    starting.close()
    verify_store(root, gc=True)


# Duplicates


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


# Before a commit


@pytest.mark.parametrize("harm", ["remove", "truncate"])
def test_a_sample_whose_fragment_is_gone_is_not_committed(
    root: Path, engine: Engine, harm: str
) -> None:
    made = engine.publish(engine.ref("s"), 5)
    path = root / made.fragments[1].path
    if harm == "remove":
        path.unlink()
    else:
        os.truncate(path, 10)
    with pytest.raises(StoreError, match=r"1\.safetensors"):
        engine.committer.commit(made)
    assert visible(root) == []
    assert not engine.committer.is_committed(RUN, "s")


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


# Disks that refuse


def test_a_read_only_directory_is_named_at_once(mount_tmpfs: Callable[[int], Tmpfs]) -> None:
    tmpfs = mount_tmpfs(1)
    engine = Engine(tmpfs.path / "store")
    engine.export("s")
    made = engine.publish(engine.ref("t"), 5)
    engine.committer._log.close()  # type: ignore[union-attr]  # an open file forbids the remount
    tmpfs.make_read_only()
    path = str(tmpfs.path / "store")
    with pytest.raises(StoreError, match=f"{path}.*EROFS.*mounted writable"):
        FileStoreWriter(path)
    with pytest.raises(StoreError, match="EROFS"):
        Engine(tmpfs.path / "store")
    with pytest.raises(StoreError, match=f"{path}.*EROFS"):
        engine.committer.commit(made)
    with pytest.raises(StoreError, match="EROFS"):
        engine.committer.record_error(engine.ref("t"), 0, "cause")
    engine.publisher.submit(job(engine.tapped, engine.ref("u"), 0, 5))
    (report,) = drain(engine.publisher, 1)
    assert report.error is not None
    assert "EROFS" in report.error
    assert visible(tmpfs.path / "store") == ["s"]


def test_a_full_disk_fails_the_sample_and_leaves_nothing_of_it(
    mount_tmpfs: Callable[[int], Tmpfs],
) -> None:
    tmpfs = mount_tmpfs(4)
    root = tmpfs.path / "store"
    engine = Engine(root)
    engine.export("fits", tokens=1000)
    before, free_bytes = files(root), tmpfs.free_bytes()
    tokens = 100_000  # 6.4 MB a stage
    for stage in (0, 1):
        engine.publisher.submit(job(engine.tapped, engine.ref("too large"), stage, tokens))
    for report in drain(engine.publisher, 2):
        assert report.error is not None
        for part in ("StoreError", str(root), "ENOSPC", "free some space"):
            assert part in report.error
        assert any(f"({size} bytes)" in report.error for size in range(6_400_000, 7_300_000))
    assert files(root) == before
    assert tmpfs.free_bytes() > free_bytes - 64 * 1024
    assert visible(root) == ["fits"]
    engine.export("fits too", tokens=1000)
    assert visible(root) == ["fits", "fits too"]
    engine.close()


def test_a_commit_that_does_not_fit_is_taken_back(mount_tmpfs: Callable[[int], Tmpfs]) -> None:
    tmpfs = mount_tmpfs(4)
    root = tmpfs.path / "store"
    engine = Engine(root)
    engine.export("before")
    ref = engine.ref("s")
    made = engine.publish(ref, 5)
    large = manifest(engine.tapped, ref, made.fragments, 5, metadata={"note": "x" * 60_000})
    filler = tmpfs.path / "filler"
    filler.write_bytes(bytes(max(0, tmpfs.free_bytes() - 8192)))
    (log,) = (root / "commits").iterdir()
    size_bytes = log.stat().st_size
    with pytest.raises(StoreError, match=r"commits/.*\(6\d{4} bytes\).*ENOSPC"):
        engine.committer.commit(large)
    assert log.stat().st_size == size_bytes
    assert visible(root) == ["before"]
    assert not engine.committer.is_committed(RUN, "s")
    filler.unlink()
    engine.committer.commit(large)
    assert visible(root) == ["before", "s"]
    assert len(list((root / "commits").iterdir())) == 1
    engine.close()


def failing(error: int) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    return fail


def test_a_commit_that_is_not_durable_is_taken_back(
    root: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine.publish(engine.ref("s"), 5)
    real_fsync = os.fsync
    fails = [True]

    def fsync(fd: int) -> None:
        if fails and os.readlink(f"/proc/self/fd/{fd}").endswith(".jsonl"):
            fails.clear()
            failing(5)()
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match=r"EIO.*check the disk"):
        engine.committer.commit(made)
    assert visible(root) == []
    engine.committer.commit(made)
    assert visible(root) == ["s"]


def test_a_log_that_cannot_be_cleaned_is_left_for_a_new_one(
    root: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.export("before")
    made = engine.publish(engine.ref("s"), 5)
    real_write = os.write

    def half(fd: int, data: memoryview) -> int:
        if len(data) < 100:
            failing(28)()
        return real_write(fd, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half)
        patch.setattr(os, "ftruncate", failing(5))
        with pytest.raises(StoreError, match="ENOSPC"):
            engine.committer.commit(made)
    assert visible(root) == ["before"]
    engine.committer.commit(made)
    assert len(list((root / "commits").iterdir())) == 2
    assert visible(root) == ["before", "s"]


def test_a_directory_that_was_removed_in_use_is_named(root: Path) -> None:
    engine = Engine(root)
    engine.export("s")
    made = engine.publish(engine.ref("t"), 5)
    shutil.move(root, root.with_name("moved"))
    with pytest.raises(StoreError, match="moved or removed while in use"):
        engine.committer.commit(made)
    engine.publisher.submit(job(engine.tapped, engine.ref("u"), 1, 5))
    (report,) = drain(engine.publisher, 1)
    assert report.error is not None
    assert "moved or removed while in use" in report.error
    assert not root.exists()
    engine.close()


def test_a_log_that_was_replaced_takes_no_commits_with_it(root: Path, engine: Engine) -> None:
    made = engine.publish(engine.ref("s"), 5)
    (log,) = (root / "commits").iterdir()
    log.unlink()
    log.touch()
    with pytest.raises(StoreError, match="was replaced while in use"):
        engine.committer.commit(made)


def test_a_store_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=f"{path}.*another directory"):
            FileStoreWriter(str(path))
        with pytest.raises(ForeignStore):
            stagetap.open_dataset(path)


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


def test_what_no_engine_could_use_is_told_before_one_starts(tmp_path: Path) -> None:
    kind = KnownKind(layer_ids=(1, 2))
    check_store(tmp_path / "new", kind)
    assert not (tmp_path / "new").exists()
    (tmp_path / "empty").mkdir()
    check_store(tmp_path / "empty", kind)
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(Refused, match="is no directory"):
        check_store(file, kind)
    with pytest.raises(Refused, match="holds other things"):
        check_store(tmp_path, kind)
    engine = Engine(tmp_path / "store")
    what = engine.tapped
    engine.close()
    held = KnownKind(
        layer_ids=what.layer_ids, weights_fingerprint=what.weights_fingerprint, dtype=what.dtype
    )
    for same in (held, msgspec.structs.replace(held, weights_fingerprint=None, dtype=None)):
        check_store(tmp_path / "store", same)
    for other in (
        {"layer_ids": (*what.layer_ids, 0)},
        {"weights_fingerprint": "other"},
        {"dtype": "float64"},
    ):
        with pytest.raises(Refused, match=f"holds data with {next(iter(other))}"):
            check_store(tmp_path / "store", msgspec.structs.replace(held, **other))
