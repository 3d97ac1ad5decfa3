"""`verify` finds what is broken, and gc sweeps what no commit names and nothing else."""

import os
import shutil
from pathlib import Path

import pytest

import stagetap
from stagetap.errors import ForeignStore, Refused
from stagetap.stores.file_verify import verify_store
from store_samples import RUN, Engine


@pytest.fixture
def whole(root: Path) -> Engine:
    engine = Engine(root)
    for number in range(4):
        engine.export(f"s{number}", tokens=5, seed=number)
    return engine


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


def test_a_whole_store(root: Path, whole: Engine) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_store(root, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert report.samples == 4
    assert report.bytes == 4 * 5 * 4 * 16 * 2
    assert report.problems == report.duplicates == report.orphans == []
    assert len(report.live_writers) == 1
    assert report.swept_bytes is None
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    whole.close()
    assert verify_store(f"file://{root}").live_writers == []


def test_every_broken_sample_is_reported_and_the_others_are_counted(
    root: Path, whole: Engine
) -> None:
    whole.close()
    dataset = stagetap.open_dataset(root)
    paths = [[root / f.path for f in dataset.manifest(n).fragments] for n in range(4)]
    paths[0][1].unlink()
    os.truncate(paths[1][0], 50)
    data = bytearray(paths[2][1].read_bytes())
    data[-1] ^= 1
    paths[2][1].write_bytes(data)
    report = verify_store(root)
    assert not report.ok
    assert report.samples == 1
    found = [(p.sample_id, p.stage, p.kind) for p in report.problems]
    assert found == [
        ("s0", 1, "MissingFragment"),
        ("s1", 0, "TruncatedFragment"),
        ("s2", 1, "ChecksumMismatch"),
    ]
    assert all(problem.run_id == RUN for problem in report.problems)
    quick = verify_store(root, checksums=False)
    assert [problem.sample_id for problem in quick.problems] == ["s0", "s1"]
    # What is broken is not swept: somebody may be able to restore it.
    before = files(root)
    verify_store(root, gc=True)
    assert files(root) == before


def test_a_second_commit_of_an_id_is_reported(
    root: Path, whole: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Engine(root)
    made = other.publish(other.ref("s1"), 6)
    # As it was for the other one, had it looked before the first commit.
    monkeypatch.setattr(other.committer, "_poll", lambda: None)
    other.committer._attempts.clear()
    other.committer.commit(made)
    other.close()
    whole.close()
    report = verify_store(root)
    assert report.ok
    assert report.samples == 4
    assert [(d.sample_id, d.attempt) for d in report.duplicates] == [("s1", made.attempt)]
    assert report.orphans == []


def test_what_no_commit_names_is_swept(root: Path, whole: Engine) -> None:
    whole.publish(whole.ref("unfinished"), 5)
    failed = whole.ref("s9")
    whole.publish(failed, 5)
    whole.committer.record_error(failed, 0, "cause")
    stale = whole.ref("s0")
    whole.publish(stale, 5)
    (root / ".stagetap.probe.123").write_text("x")
    (root / "nonces" / "of-an-engine-that-was-killed").write_text("x")
    stagetap.open_dataset(root).delete("s3")
    report = verify_store(root)
    assert {orphan.path.split("/")[1] for orphan in report.orphans if "/" in orphan.path} == {
        "unfinished",
        "s9",
        "s0",
    }
    with pytest.raises(Refused, match=r"in use by .*: sweep it when that has ended"):
        verify_store(root, gc=True)
    assert (root / RUN / "unfinished").exists()
    whole.close()
    before = sum(len(data) for data in files(root).values())
    report = verify_store(root, gc=True)
    assert report.ok
    assert report.samples == 3
    assert report.swept_bytes == before - sum(len(data) for data in files(root).values())
    assert sorted(path.name for path in (root / RUN).iterdir()) == ["s0", "s1", "s2"]
    assert len(list((root / RUN / "s0").iterdir())) == 1
    assert list((root / "nonces").iterdir()) == []
    assert not (root / ".stagetap.probe.123").exists()
    assert verify_store(root, gc=True).swept_bytes == 0
    assert stagetap.open_dataset(root, verify=True).sample_ids == ["s0", "s1", "s2"]


def test_what_a_killed_deletion_left_is_swept(root: Path, whole: Engine) -> None:
    whole.close()
    dataset = stagetap.open_dataset(root)
    kept = shutil.copytree(root / RUN / "s1", root.with_name("kept"))
    dataset.delete("s1")
    shutil.copytree(kept, root / RUN / "s1")
    assert [orphan.path.split("/")[1] for orphan in verify_store(root).orphans] == ["s1"]
    verify_store(root, gc=True)
    assert not (root / RUN / "s1").exists()


def test_what_is_not_ours_survives(root: Path, whole: Engine, tmp_path: Path) -> None:
    whole.close()
    elsewhere = tmp_path / "elsewhere" / "sample" / "attempt"
    elsewhere.mkdir(parents=True)
    (elsewhere / "0.safetensors").write_text("somebody's")
    for path in ("mine/deep/down/thesis.tex", "mine/file", "notes.txt", f"{RUN}/notes.txt"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("mine")
    attempt = root / RUN / "s9" / "attempt"
    attempt.mkdir(parents=True)
    (attempt / "0.safetensors").write_text("x")
    (attempt / "thesis.tex").write_text("mine")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    before = files(root)
    report = verify_store(root, gc=True)
    assert report.orphans == []
    assert files(root) == before
    assert (elsewhere / "0.safetensors").exists()


def test_nothing_is_swept_while_a_log_cannot_be_read(root: Path, whole: Engine) -> None:
    whole.publish(whole.ref("unfinished"), 5)
    whole.close()
    (log,) = (root / "commits").iterdir()
    data = bytearray(log.read_bytes())
    data[100] ^= 1
    log.write_bytes(data)
    report = verify_store(root)
    assert not report.ok
    assert [problem.kind for problem in report.problems] == ["CorruptLog"]
    with pytest.raises(Refused, match="nothing was swept"):
        verify_store(root, gc=True)
    assert (root / RUN / "unfinished").exists()


def test_an_engine_does_not_start_in_the_middle_of_a_sweep(root: Path, whole: Engine) -> None:
    whole.close()
    refused: list[str] = []

    def start(done: int, total: int) -> None:
        with pytest.raises(Refused, match="being swept"):
            Engine(root)
        refused.append("once")

    verify_store(root, gc=True, progress=start)
    assert len(refused) == 4
    Engine(root).close()


def test_no_store_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ForeignStore):
        verify_store(tmp_path)
    with pytest.raises(ForeignStore):
        verify_store(tmp_path / "nowhere", gc=True)
