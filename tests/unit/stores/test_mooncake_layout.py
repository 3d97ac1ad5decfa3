"""Keys of the Mooncake store: distinct things have distinct keys, and sizes follow from sizes."""

import itertools
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagetap.keys import RESERVED
from stagetap.manifest import Fragment, sample_bytes
from stagetap.stores.base import SampleRef
from stagetap.stores.mooncake_layout import (
    MARK_EVERY,
    PAGE_WINDOW,
    ack_key,
    claim_key,
    error_record_key,
    fragment_path,
    input_ids_key,
    invariant_key,
    is_of_samples,
    mark_keys,
    misplaced,
    next_position,
    page_key,
    part_key,
    part_sizes,
    sample_commit_key,
    tombstone_key,
    writer_key,
)
from store_samples import manifest, owned, tapped

# Names of our own objects, and texts made to look like other keys.
hostile = st.sampled_from(
    [*sorted(RESERVED), "index", "writers", "claim", "ack", "deleted", "0", "0.0", "a/b", "a_b"]
)
tricky = st.text(alphabet="0./%_ac~", min_size=1, max_size=5)
ids = st.one_of(hostile, tricky, st.text(min_size=1, max_size=200))
refs = st.builds(SampleRef, run_id=ids, sample_id=ids, attempt=ids)


def keys_below(ref: SampleRef) -> list[str]:
    path = fragment_path(ref, 0)
    return [
        path,
        fragment_path(ref, 1),
        part_key(path, 0),
        part_key(path, 1),
        input_ids_key(path),
        error_record_key(ref, None),
        error_record_key(ref, 0),
        claim_key(ref),
        ack_key(ref, "c"),
        ack_key(ref, "d"),
        tombstone_key(ref),
    ]


def keys_of_run(run: str) -> list[str]:
    return [
        invariant_key(run),
        writer_key(run, 0),
        writer_key(run, 1),
        *itertools.chain.from_iterable(
            [page_key(run, w, 0), page_key(run, w, 1), *mark_keys(run, w)] for w in ("w", "v")
        ),
    ]


@settings(deadline=None, max_examples=400)
@given(refs, refs)
@example(
    SampleRef(run_id="r", sample_id="a/b", attempt="x"),
    SampleRef(run_id="r", sample_id="a", attempt="b/x"),
)
@example(
    SampleRef(run_id="r", sample_id="a/b", attempt="x"),
    SampleRef(run_id="r", sample_id="a_b", attempt="x"),
)
@example(
    SampleRef(run_id="r", sample_id="index", attempt="w.0"),
    SampleRef(run_id="r", sample_id="writers", attempt="0"),
)
def test_distinct_things_have_distinct_keys(one: SampleRef, other: SampleRef) -> None:
    named = {
        key: name
        for ref in (one, other)
        for number, key in enumerate(keys_below(ref))
        for name in [(ref, number)]
    }
    assert len(named) == len({one, other}) * len(keys_below(one))
    commits = {sample_commit_key(ref.run_id, ref.sample_id) for ref in (one, other)}
    assert len(commits) == len({(ref.run_id, ref.sample_id) for ref in (one, other)})
    runs = {run: keys_of_run(run) for run in (one.run_id, other.run_id)}
    of_runs = {key for keys in runs.values() for key in keys}
    assert len(of_runs) == sum(map(len, runs.values()))
    assert not commits & of_runs
    assert not commits & named.keys()
    assert not of_runs & named.keys()


@settings(deadline=None, max_examples=100)
@given(ids, ids, st.integers(0, 3), st.integers(0, 3))
def test_pages_of_different_writers_are_distinct(a: str, b: str, m: int, n: int) -> None:
    assert (page_key("r", a, m) == page_key("r", b, n)) == ((a, m) == (b, n))


@given(refs)
def test_keys_are_bounded_and_printable(ref: SampleRef) -> None:
    for key in (*keys_below(ref), *keys_of_run(ref.run_id)):
        assert re.fullmatch(r"[!-~]{1,600}", key)


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_part_sizes_are_those_of_a_stream_through_slots(total: int, slot: int) -> None:
    written = [min(slot, total - start) for start in range(0, total, slot)]
    assert part_sizes(total, written[0], len(written)) == tuple(written)


@given(st.integers(1, 100), st.integers(0, 120), st.integers(0, 10))
def test_part_sizes_fit_or_are_none(total: int, first: int, parts: int) -> None:
    sizes = part_sizes(total, first, parts)
    if sizes is not None:
        assert sum(sizes) == total
        assert len(sizes) == parts
        assert max(sizes) == sizes[0] == first
    else:
        exact = first == total if parts == 1 else first * (parts - 1) < total <= first * parts
        assert parts < 1 or not exact


@given(st.lists(st.booleans(), max_size=PAGE_WINDOW))
def test_a_probe_goes_on_behind_the_last_page_that_exists(exists: list[bool]) -> None:
    there, advance = next_position(exists)
    assert [offset in there for offset in range(len(exists))] == exists
    assert not any(exists[advance:])
    assert advance == 0 or exists[advance - 1]


def test_a_window_reaches_beyond_what_a_mark_can_miss() -> None:
    assert PAGE_WINDOW > MARK_EVERY


def test_a_fragment_elsewhere_is_misplaced() -> None:
    ref = SampleRef(run_id="r", sample_id="s", attempt="a")
    what = tapped()

    def fragment(path: str, parts: tuple[str, ...] = ()) -> Fragment:
        layers = owned(what, 0)
        return Fragment(
            stage=0,
            layers=layers,
            path=path,
            dtype="bfloat16",
            shape=(1, len(layers), 16),
            byte_size=len(layers) * 32,
            checksum="xxh3_64:" + "0" * 16,
            file_bytes=None,
            parts=parts,
            input_ids=True,
        )

    path = fragment_path(ref, 0)
    made = manifest(what, ref, (), 1)
    assert misplaced(made, fragment(path)) is None
    assert misplaced(made, fragment(path, (f"{path}/0", f"{path}/1"))) is None
    assert misplaced(made, fragment("r/s/a/1"))
    assert misplaced(made, fragment("r/other/a/0"))
    assert misplaced(made, fragment(path, (f"{path}/0",)))
    assert misplaced(made, fragment(path, (f"{path}/1", f"{path}/0")))


def test_bytes_of_a_sample() -> None:
    assert sample_bytes(10, 3, 64, 2) == 10 * 3 * 64 * 2 + 10 * 8


def test_what_is_of_samples_and_what_is_of_the_run() -> None:
    ref = SampleRef(run_id="r", sample_id="s/1", attempt="a")
    of_samples = [
        sample_commit_key("r", "s/1"),
        sample_commit_key("r", "index"),
        fragment_path(ref, 0),
        part_key(fragment_path(ref, 0), 3),
        input_ids_key(fragment_path(ref, 0)),
        error_record_key(ref, None),
        claim_key(ref),
        tombstone_key(ref),
        page_key("r", "w", 7),
    ]
    of_the_run = [invariant_key("r"), writer_key("r", 0), *mark_keys("r", "w"), "stagetap.protocol"]
    assert all(is_of_samples("r", key) for key in of_samples)
    assert not any(is_of_samples("r", key) for key in of_the_run)
    assert not any(is_of_samples("r2", key) for key in of_samples)
