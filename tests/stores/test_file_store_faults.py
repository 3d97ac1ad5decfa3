"""The file store where disks are full, slow or failing, and directories change under it."""

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagetap.errors import (
    StoreError,
)
from stagetap.stores.file_writer import FileStoreWriter
from store_samples import RUN, Engine, drain, files, job, manifest, visible
from tmpfs import Tmpfs


def failing(error: int) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise OSError(error, os.strerror(error))

    return fail


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
