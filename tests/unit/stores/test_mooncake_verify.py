"""What `verify` says of a Mooncake run, and what `--gc` leaves."""

from contextlib import suppress

import pytest

from stagetap.errors import Refused
from stagetap.stores import verify as dispatch
from stagetap.stores.base import SampleRef
from stagetap.stores.mooncake_layout import sample_commit_key
from stagetap.stores.mooncake_verify import verify_run
from stagetap.stores.verify_report import VerifyReport
from store_samples import RUN, Engine
from unit.stores.memory_objects import Died, Master, dies_at
from unit.stores.memory_store import flip, make_engine, objects_of, reader_of


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def engine(master: Master) -> Engine:
    engine = make_engine(master)
    engine.export("whole", 9)
    engine.export("other", 5, seed=1)
    return engine


def looked(master: Master, gc: bool = False, checksums: bool = True) -> VerifyReport:
    return verify_run(
        reader_of(master), lambda: list(master.objects), checksums=checksums, gc=gc, settle_s=0
    )


def test_a_whole_run(master: Master, engine: Engine) -> None:
    seen: list[tuple[int, int]] = []
    before = dict(master.objects)
    report = verify_run(
        reader_of(master), None, checksums=True, gc=False, progress=lambda *n: seen.append(n)
    )
    assert report.ok
    assert (report.samples, report.bytes) == (2, 14 * 4 * 16 * 2)
    assert seen == [(1, 2), (2, 2)]
    assert looked(master, gc=True).orphans == []
    assert master.objects == before
    engine.close()


def test_what_is_broken_is_named(master: Master, engine: Engine) -> None:
    made = engine.export("flipped", 5)
    key = made.fragments[1].path
    master.objects[key] = master.objects[key][:-1] + b"!"
    gone = engine.export("gone", 5)
    del master.objects[gone.fragments[0].path]
    report = looked(master)
    assert [(each.kind, each.sample_id, each.stage) for each in report.problems] == [
        ("ChecksumMismatch", "flipped", 1),
        ("MissingFragment", "gone", 0),
    ]
    assert report.samples == 2
    assert [each.sample_id for each in looked(master, checksums=False).problems] == ["gone"]
    assert looked(master, gc=True).orphans == [], "what a commit names is kept"
    engine.close()


def test_all_that_is_damaged_is_named_and_a_retry_finds_the_sample_again(
    master: Master, engine: Engine
) -> None:
    engine.export("last", 5)
    pages = sorted(key for key in master.objects if key.endswith((".0", ".1")))
    commit = sample_commit_key(RUN, "last")
    for key in (*pages, commit):
        master.objects[key] = flip(master.objects[key], -2)
    report = looked(master)
    assert {(each.kind, each.sample_id) for each in report.problems} == {
        ("CorruptLog", None),
        ("CorruptLog", "last"),
    }
    assert len(report.problems) == 3
    looked(master, gc=True)
    assert not {*pages, commit} & set(master.objects)
    assert engine.committer.is_committed(RUN, "whole")
    assert engine.committer.is_committed(RUN, "other")
    engine.export("last", 5)
    assert looked(master).samples == 3
    engine.close()


def test_what_no_commit_names_is_swept(master: Master, engine: Engine) -> None:
    before = dict(master.objects)
    engine.publish(engine.ref("killed"), 9)
    failed = engine.ref("failed")
    engine.committer.record_error(failed, 1, "the disk is on fire")
    report = looked(master)
    names = sorted(each.path for each in report.orphans)
    assert [name.split("/")[1] for name in names] == ["failed", "index", "killed"]
    assert sum(each.size_bytes for each in report.orphans) > 9 * 4 * 16 * 2
    assert report.swept_bytes is None
    swept = looked(master, gc=True)
    assert swept.swept_bytes == sum(each.size_bytes for each in report.orphans)
    assert master.objects == before
    engine.export("killed", 3)  # the run goes on
    assert looked(master).samples == 3
    engine.close()


def test_what_is_committed_while_it_waits_is_kept(master: Master, engine: Engine) -> None:
    made = engine.publish(engine.ref("late"), 9)
    looks = 0

    def list_keys() -> list[str]:
        nonlocal looks
        looks += 1
        if looks == 2:
            engine.committer.commit(made)
        return list(master.objects)

    report = verify_run(reader_of(master), list_keys, checksums=True, gc=True, settle_s=0)
    assert report.orphans == []
    assert looked(master).samples == 3
    engine.close()


@pytest.mark.parametrize("step", range(1, 8))
def test_a_removal_that_died_anywhere_is_finished(
    master: Master, engine: Engine, step: int
) -> None:
    before = dict(master.objects)
    engine.export("doomed", 5)
    reader = reader_of(master)
    entry = reader.poll()[0][-1]
    assert entry.sample_id == "doomed"
    objects = reader.connection.objects
    objects.before = dies_at(step)  # type: ignore[attr-defined]
    with suppress(Died):
        reader.delete([entry])
    assert looked(master).ok, "nobody takes what is left for a broken sample"
    looked(master, gc=True)
    assert master.objects == before
    engine.close()


def test_a_commit_without_its_page_keeps_its_fragments(master: Master, engine: Engine) -> None:
    made = engine.publish(engine.ref("unpaged"), 5)
    objects_of(engine).before = dies_at(1)
    with pytest.raises(Died):
        engine.committer.commit(made)
    objects_of(engine).before = lambda *_: None
    before = dict(master.objects)
    looked(master, gc=True)
    assert master.objects == before
    assert reader_of(master).find_commit("unpaged") is not None


def test_keys_of_another_master_are_refused(master: Master, engine: Engine) -> None:
    other = Master()
    make_engine(other, run="run-2").close()
    with pytest.raises(Refused, match="--metrics is another master's"):
        verify_run(
            reader_of(master), lambda: list(other.objects), checksums=True, gc=True, settle_s=0
        )
    engine.close()


def test_what_cannot_be_done_is_refused_before_anything_is_opened(tmp_path: object) -> None:
    with pytest.raises(Refused, match=r"cannot list keys.*add --metrics"):
        dispatch.verify("mooncake://127.0.0.1:1/run", gc=True)
    with pytest.raises(Refused, match="--metrics is for Mooncake alone"):
        dispatch.verify(str(tmp_path), metrics="127.0.0.1:1")


def test_other_runs_are_left_alone(master: Master, engine: Engine) -> None:
    other = make_engine(master, run=RUN + "-b")
    other.publish(SampleRef(run_id=RUN + "-b", sample_id="s", attempt="a"), 5)
    before = dict(master.objects)
    looked(master, gc=True)
    assert master.objects == before
    engine.close()
    other.close()
