"""An order can be found again, whatever happened to the store since."""

import json
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagetap.errors import Refused
from stagetap.reader.order import CommitOrder
from stagetap.stores.base import CommitEntry, DeleteEntry

_attempts = count()


def commit(
    sample: str = "s", at: int = 0, writer: str = "w", line: int = 0, run: str = "r"
) -> CommitEntry:
    return CommitEntry(
        committed_at_ns=at,
        writer=writer,
        line=line,
        run_id=run,
        sample_id=sample,
        attempt=f"a{next(_attempts)}",
        offset=0,
        length=0,
    )


def deletion(of: CommitEntry, line: int = 0, writer: str = "d") -> DeleteEntry:
    return DeleteEntry(
        writer=writer, line=line, run_id=of.run_id, sample_id=of.sample_id, attempt=of.attempt
    )


def ids(order: CommitOrder) -> list[str]:
    return [entry.sample_id for entry in order.entries]


def order_of(*commits: CommitEntry, run: str | None = None) -> CommitOrder:
    order = CommitOrder(run)
    order.learn(commits, [])
    order.extend()
    return order


def test_the_order_is_commit_time_then_writer_then_line() -> None:
    order = order_of(
        commit("d", 2, "a", 0),
        commit("c", 1, "b", 1),
        commit("b", 1, "b", 0),
        commit("a", 1, "a", 0),
    )
    assert ids(order) == ["a", "b", "c", "d"]


def test_of_two_commits_of_one_sample_the_earliest_counts() -> None:
    late, early = commit("s", 2, "a"), commit("s", 1, "b")
    order = order_of(late, early)
    assert order.entries == [early]
    assert order.attempts("s") == [late, early]


def test_a_refresh_appends_even_what_was_committed_earlier() -> None:
    order = order_of(commit("b", 5, "a"))
    order.learn([commit("a", 1, "z")], [])
    assert ids(order) == ["b"]
    assert order.extend() == 1
    assert ids(order) == ["b", "a"]
    assert order.extend() == 0


def test_what_is_deleted_before_opening_is_not_there() -> None:
    gone, kept = commit("gone", 1), commit("kept", 2, line=1)
    order = CommitOrder()
    order.learn([gone, kept], [deletion(gone)])
    order.extend()
    assert ids(order) == ["kept"]
    assert order.named("gone") == []
    assert order.attempts("gone") == [gone]


def test_what_is_deleted_later_keeps_its_position_but_not_its_name() -> None:
    gone, kept = commit("gone", 1), commit("kept", 2, line=1)
    order = order_of(gone, kept)
    order.learn([], [deletion(gone)])
    order.extend()
    assert ids(order) == ["gone", "kept"]
    assert order.is_deleted(gone)
    assert order.named("gone") == []


def test_a_refresh_that_does_not_continue_the_order_is_found_again() -> None:
    early, late = commit("early", 1, "z"), commit("late", 5, "a")
    order = order_of(late)
    order.learn([early], [])
    order.extend()
    later = order_of(early, late)
    assert ids(later) == ["early", "late"]
    later.restore(order.state())
    assert ids(later) == ["late", "early"]


def test_a_deleted_id_can_come_again() -> None:
    first = commit("s", 1)
    order = order_of(first)
    again = commit("s", 2, line=1)
    order.learn([again], [deletion(first)])
    assert order.extend() == 1
    assert order.named("s") == [again]


def test_a_loser_does_not_come_forward_when_the_winner_is_deleted_together_with_it() -> None:
    winner, loser = commit("s", 1, "a"), commit("s", 2, "b")
    order = CommitOrder()
    order.learn([winner, loser], [deletion(winner), deletion(loser, 1)])
    order.extend()
    assert ids(order) == []


def test_a_run_can_be_kept_alone() -> None:
    order = order_of(commit("s", 1, run="one"), commit("s", 2, line=1, run="two"), run="two")
    assert [entry.run_id for entry in order.entries] == ["two"]
    assert [entry.run_id for entry in order.attempts("s")] == ["two"]
    both = order_of(commit("s", 1, run="one"), commit("s", 2, line=1, run="two"))
    assert len(both.named("s")) == 2


def test_refreshes_in_order_leave_one_mark() -> None:
    order = CommitOrder()
    order.extend()
    for line in range(50):
        order.learn([commit(f"s{line}", line + 1, line=line)], [])
        order.extend()
    assert len(order.state()["marks"]) == 1


def test_deletions_of_older_samples_add_no_marks() -> None:
    order = CommitOrder()
    previous: CommitEntry | None = None
    for line in range(50):
        entry = commit(f"s{line}", line + 1, line=line)
        order.learn([entry], [deletion(previous, line - 1)] if previous else [])
        order.extend()
        previous = entry
    assert len(order.state()["marks"]) == 1
    assert len(order.entries) == 50


@pytest.mark.parametrize("state", [None, [], {}, {"run": None, "marks": [1]}, {"run": 1}])
def test_what_is_no_state_is_refused(state: object) -> None:
    with pytest.raises(Refused, match="not a state"):
        order_of(commit()).restore(state)


def test_a_state_of_another_store_or_run_is_refused() -> None:
    state = order_of(commit("a", 1), commit("b", 2, line=1)).state()
    with pytest.raises(Refused, match="rests on 2 lines of the commit log of w, this store has 1"):
        order_of(commit("a", 1)).restore(state)
    with pytest.raises(Refused, match="commit log of w"):
        order_of(commit("a", 1, "other")).restore(state)
    with pytest.raises(Refused, match="run None"):
        order_of(run="r").restore(state)
    negative = {"run": None, "marks": [{"commits": {"w": -1}, "deletes": {}}]}
    with pytest.raises(Refused):
        order_of(commit("a", 1)).restore(negative)


# What happens to a store: commits by three writers whose clocks disagree, deletions, refreshes.
events = st.lists(
    st.one_of(
        st.tuples(st.just("commit"), st.integers(0, 2), st.integers(0, 6), st.integers(0, 5)),
        st.tuples(st.just("delete"), st.integers(0, 1), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("extend"), st.just(0), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(events)
def test_any_noted_order_is_found_again_on_the_store_as_it_is_later(
    happened: list[tuple[str, int, int, int]],
) -> None:
    order = CommitOrder()
    order.extend()
    commits: list[CommitEntry] = []
    deletes: list[DeleteEntry] = []
    clocks, lines, delete_lines = [0, 0, 0], [0, 0, 0], [0, 0]
    noted = []
    for what, who, number, step in happened:
        if what == "commit":
            clocks[who] += step + 1
            entry = commit(f"s{number}", clocks[who], f"w{who}", lines[who])
            lines[who] += 1
            commits.append(entry)
            order.learn([entry], [])
        elif what == "delete" and commits:
            gone = deletion(commits[number % len(commits)], delete_lines[who], f"d{who}")
            delete_lines[who] += 1
            deletes.append(gone)
            order.learn([], [gone])
        elif what == "extend":
            before = list(order.entries)
            order.extend()
            assert order.entries[: len(before)] == before
            noted.append((json.loads(json.dumps(order.state())), list(order.entries)))
    later = CommitOrder()
    later.learn(commits, deletes)
    later.extend()
    for state, entries in noted:
        later.restore(state)
        assert later.entries == entries
        assert later.state() == state
    attempts = [entry.attempt for entry in order.entries]
    assert len(attempts) == len(set(attempts))
