"""The one order in which a dataset gives its samples, and how to find the same order again. Pure.

Logs only grow, so "the first n lines of each log" names a set of commits for ever. An order is a
list of such marks: one for the opening of the dataset, and one for each later refresh that did not
simply continue the one before. Restoring the marks restores the order, whatever was committed or
deleted since; that is what makes a position a safe thing to resume from.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from stagetap.errors import Refused
from stagetap.stores.base import CommitEntry, DeleteEntry

Attempt = tuple[str, str, str]
SampleKey = tuple[str, str]


class Mark(msgspec.Struct, forbid_unknown_fields=True):
    """How many lines of each log, by the name of its writer, one part of an order rests on."""

    commits: dict[str, int]
    deletes: dict[str, int]


class OrderState(msgspec.Struct, forbid_unknown_fields=True):
    """An order, written down. `run` is the filter it was made with."""

    run: str | None
    marks: list[Mark]


class CommitOrder:
    """All known commits, and `entries`, the visible ones in order; `entries` only ever grows.

    Within a part the order is (commit time, writer, line). Of two commits of one sample the first
    in that order counts. What was deleted before a part was ordered is not in it.
    """

    def __init__(self, run_id: str | None = None) -> None:
        """`run_id` keeps the commits of one run alone."""
        self.entries: list[CommitEntry] = []
        self.run_id = run_id
        self._commits: dict[str, list[CommitEntry]] = {}
        self._deletes: dict[str, list[DeleteEntry]] = {}
        self._deleted: set[Attempt] = set()
        self._by_id: dict[str, list[CommitEntry]] = {}
        self._forget_order()

    def learn(self, commits: Iterable[CommitEntry], deletes: Iterable[DeleteEntry]) -> None:
        """Take note of new log lines; `entries` stays as it is."""
        for commit in commits:
            self._commits.setdefault(commit.writer, []).append(commit)
            self._by_id.setdefault(commit.sample_id, []).append(commit)
        for deletion in deletes:
            self._deletes.setdefault(deletion.writer, []).append(deletion)
            self._deleted.add(_attempt(deletion))

    def extend(self) -> int:
        """Append what was learnt and is not ordered yet; return how many entries were added."""
        mark = Mark(commits=_counts(self._commits), deletes=_counts(self._deletes))
        fresh = self._fresh(mark)
        if not fresh and self._marks:
            return 0
        # As long as no deletion matters to the fresh ones and all of them come behind the others,
        # one mark says it all. So the list stays short however often a trainer refreshes.
        continues = (
            bool(self._marks)
            and fresh[0].order > self._last_order
            and not any(self._deletions_matter_to(entry) for entry in fresh)
        )
        if continues:
            mark.deletes = self._marks.pop().deletes
        return self._append(mark, fresh, self._deleted)

    def named(self, sample_id: str) -> list[CommitEntry]:
        """The visible commits of this id that are not deleted by now, one a run."""
        entries = [self.entries[position] for position in self._positions.get(sample_id, ())]
        return [entry for entry in entries if not self.is_deleted(entry)]

    def attempts(self, sample_id: str) -> list[CommitEntry]:
        """All known commits of this id: visible or not, deleted or not."""
        known = self._by_id.get(sample_id, ())
        return [entry for entry in known if self.run_id in (None, entry.run_id)]

    @property
    def runs(self) -> list[str]:
        """The runs of all known commits."""
        return sorted({entry.run_id for each in self._commits.values() for entry in each})

    def is_deleted(self, entry: CommitEntry) -> bool:
        """Whether a deletion of this commit is known by now."""
        return _attempt(entry) in self._deleted

    def state(self) -> dict[str, Any]:
        """What `restore` needs to find this order again, as plain JSON values."""
        return msgspec.to_builtins(OrderState(run=self.run_id, marks=self._marks))

    def restore(self, state: object) -> None:
        """Make `entries` what it was when `state` was taken.

        Raises Refused when the state is not of this store or was taken under another filter.
        """
        try:
            wanted = msgspec.convert(state, OrderState)
        except msgspec.ValidationError as error:
            raise Refused(f"not a state of a dataset ({error}): give one it returned") from error
        if wanted.run != self.run_id:
            raise Refused(
                f"the state is of run {wanted.run!r}, this dataset was opened with run "
                f"{self.run_id!r}: open it with the same run"
            )
        for mark in wanted.marks:
            _check_known("commit", mark.commits, self._commits)
            _check_known("delete", mark.deletes, self._deletes)
        self._forget_order()
        for mark in wanted.marks:
            self._append(mark, self._fresh(mark), self._deleted_at(mark))

    def _forget_order(self) -> None:
        self.entries = []
        self._positions: dict[str, list[int]] = {}
        self._marks: list[Mark] = []
        self._ordered_lines: dict[str, int] = {}
        self._ordered: dict[SampleKey, Attempt] = {}
        self._last_order = (-1, "", -1)

    def _fresh(self, mark: Mark) -> list[CommitEntry]:
        """The commits up to `mark` that are not ordered yet, in order."""
        fresh = [
            entry
            for writer, lines in mark.commits.items()
            for entry in self._commits[writer][self._ordered_lines.get(writer, 0) : lines]
            if self.run_id in (None, entry.run_id)
        ]
        return sorted(fresh, key=lambda entry: entry.order)

    def _append(self, mark: Mark, fresh: list[CommitEntry], deleted: set[Attempt]) -> int:
        before = len(self.entries)
        for entry in fresh:
            counted = self._ordered.get(_key(entry))
            is_first = counted is None or counted in deleted
            if is_first and _attempt(entry) not in deleted:
                self._ordered[_key(entry)] = _attempt(entry)
                self._positions.setdefault(entry.sample_id, []).append(len(self.entries))
                self.entries.append(entry)
            self._last_order = max(self._last_order, entry.order)
        self._ordered_lines = mark.commits
        self._marks.append(mark)
        return len(self.entries) - before

    def _deletions_matter_to(self, entry: CommitEntry) -> bool:
        return _attempt(entry) in self._deleted or _key(entry) in self._ordered

    def _deleted_at(self, mark: Mark) -> set[Attempt]:
        return {
            _attempt(deletion)
            for writer, lines in mark.deletes.items()
            for deletion in self._deletes[writer][:lines]
        }


def _key(entry: CommitEntry) -> SampleKey:
    return (entry.run_id, entry.sample_id)


def _attempt(entry: CommitEntry | DeleteEntry) -> Attempt:
    return (entry.run_id, entry.sample_id, entry.attempt)


def _counts(logs: dict[str, list[Any]]) -> dict[str, int]:
    return {writer: len(lines) for writer, lines in logs.items()}


def _check_known(what: str, marked: dict[str, int], logs: dict[str, list[Any]]) -> None:
    for writer, lines in marked.items():
        known = len(logs.get(writer, ()))
        if not 0 <= lines <= known:
            raise Refused(
                f"the state rests on {lines} lines of the {what} log of {writer}, this store has "
                f"{known}: it is the state of another store, a log was lost, or samples were "
                "consumed since"
            )
