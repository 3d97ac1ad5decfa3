"""Taking things out of a file store: what was read, and what no commit names.

Only files with the store's own names are ever removed, so that a directory of somebody else's that
was put into a store survives every sweep.
"""

import os
from collections.abc import Iterable, Sequence

from stagetap.stores.base import CommitEntry, SampleRef
from stagetap.stores.file_commits import Ledger, delete_body
from stagetap.stores.file_io import (
    SCRATCH_PREFIX,
    listed,
    naming,
    remove_directory_if_empty,
    remove_if_there,
)
from stagetap.stores.file_layout import DELETES, attempt_path, is_error_record, is_fragment
from stagetap.stores.file_log import LogWriter, new_writer_name


class Deletions:
    """Writes deletions down: one log per process that deletes, created by its first deletion."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._ledger = Ledger(root)
        self._gone: set[tuple[str, str, str]] = set()
        self._log: LogWriter | None = None
        self._log_pid = -1

    def add(self, entries: Sequence[CommitEntry]) -> None:
        """Note, durably, those that are not noted yet. Raises StoreError."""
        for deletion in self._ledger.poll_deletes():
            self._gone.add((deletion.run_id, deletion.sample_id, deletion.attempt))
        for entry in entries:
            if (entry.run_id, entry.sample_id, entry.attempt) not in self._gone:
                self._own_log().append(delete_body(entry))

    def __reduce__(self) -> tuple[type["Deletions"], tuple[str]]:
        return Deletions, (self._root,)

    def _own_log(self) -> LogWriter:
        """The log of this very process; a forked child must not write to its parent's."""
        if self._log is None or not self._log.usable or self._log_pid != os.getpid():
            self._log = LogWriter(os.path.join(self._root, DELETES), new_writer_name())
            self._log_pid = os.getpid()
        return self._log


def attempt_directory(entry: CommitEntry) -> str:
    """Where the fragments of a commit lie, relative to the store."""
    ref = SampleRef(run_id=entry.run_id, sample_id=entry.sample_id, attempt=entry.attempt)
    return attempt_path(ref)


def is_ours(names: Iterable[str]) -> bool:
    """Whether a directory with these files can be an attempt."""
    return all(
        is_fragment(name) or is_error_record(name) or name.startswith(SCRATCH_PREFIX)
        for name in names
    )


def remove_attempt(root: str, relative_path: str) -> None:
    """Remove an attempt, and its sample and run if nothing else is in them. Raises StoreError.

    That it is gone already, or is being removed by somebody else, is no error.
    """
    attempt = os.path.join(root, relative_path)
    for name in listed(attempt):
        if is_ours([name]):
            with naming("remove", os.path.join(attempt, name)):
                remove_if_there(os.path.join(attempt, name))
    sample = os.path.dirname(attempt)
    for directory in (attempt, sample, os.path.dirname(sample)):
        with naming("remove", directory):
            if not remove_directory_if_empty(directory):
                return
