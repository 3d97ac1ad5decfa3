"""The scheduler's side of the file store: one fsynced line makes a sample visible."""

import os
import threading
import time

import msgspec

from stagetap.errors import DuplicateSample, MalformedManifest, Refused, StageTapError, StoreError
from stagetap.keys import component
from stagetap.manifest import Fragment, Manifest
from stagetap.stores.base import Invariant, SampleRef
from stagetap.stores.file_commits import Ledger, commit_body
from stagetap.stores.file_invariant import claim, is_claimed
from stagetap.stores.file_io import (
    make_below,
    make_root,
    naming,
    remove_if_there,
    try_lock,
    write_durably,
)
from stagetap.stores.file_layout import COMMITS, INVARIANT_NAME, NONCES, attempt_path, error_path
from stagetap.stores.file_log import LogWriter, new_writer_name
from stagetap.stores.kind import difference, kind_of


class FileStoreCommitter:
    """Commits samples to one directory, from any thread of one process."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._writing = threading.Lock()  # held over an fsync, and taken before the next one
        self._lock = threading.Lock()  # guards the ledger and what is known of commits
        self._own_writers: set[str] = set()
        self._ledger = Ledger(root)
        self._attempts: dict[tuple[str, str], set[str]] = {}  # committed and not deleted
        self._invariant: Invariant | None = None
        self._log: LogWriter | None = None
        self._store_lock_fd = -1
        self._nonce_path = ""
        self._last_commit_ns = 0

    def leave_nonce(self, nonce: str) -> None:
        """Write the nonce below the directory, which is created. Raises Refused, StoreError."""
        make_root(self._root)
        if is_claimed(self._root):
            # From here on gc must not take the nonce for a leftover.
            self._lock_store()
        make_below(self._root, NONCES)
        self._nonce_path = os.path.join(self._root, NONCES, component(nonce))
        write_durably(self._nonce_path, nonce.encode())

    def begin_run(self, invariant: Invariant) -> None:
        """Claim the directory, lock it against gc, open this writer's log.

        Raises Refused or StoreError, and CorruptLog when earlier commits cannot be read.
        """
        make_root(self._root)
        claim(self._root, invariant)
        self._invariant = invariant
        try:
            self._lock_store()
            with self._lock:
                self._poll()
            self._log = self._new_log()
        except BaseException:
            self.close()
            raise

    def is_committed(self, run_id: str, sample_id: str) -> bool:
        """Whether a commit exists that was not deleted, by whichever writer. Raises StoreError."""
        with self._lock:
            self._poll()
            return (run_id, sample_id) in self._attempts

    def commit(self, manifest: Manifest) -> None:
        """Append the commit and fsync it. See StoreCommitter."""
        if self._log is None or self._invariant is None:
            raise StageTapError("begin_run comes before commit")
        _check_kind(self._invariant, manifest)
        self._check_fragments(manifest)
        key = (manifest.run_id, manifest.sample_id)
        with self._writing:
            if self.is_committed(*key):
                raise DuplicateSample(
                    f"sample {manifest.sample_id!r} of run {manifest.run_id!r} is committed "
                    "already: give it another id or leave it out"
                )
            # A clock that was set back must not reorder what this writer committed.
            now_ns = max(time.time_ns(), self._last_commit_ns + 1)
            body = commit_body(now_ns, manifest)
            if not self._log.usable:
                self._log = self._new_log()
            # An fsync may take for ever: who only looks must not wait for it.
            self._log.append(body)
            self._last_commit_ns = now_ns
            with self._lock:
                self._attempts[key] = {manifest.attempt}

    def discard(self, fragment: Fragment) -> None:
        """It stays until gc: a directory has room, and a retry has names of its own."""

    def record_error(self, ref: SampleRef, stage: int | None, cause: str) -> None:
        """Leave `error.<stage>.json` under the attempt. Raises StoreError."""
        fields = {
            "run_id": ref.run_id,
            "sample_id": ref.sample_id,
            "attempt": ref.attempt,
            "stage": stage,
            "cause": cause,
            "failed_at_ns": time.time_ns(),
        }
        path = os.path.join(self._root, error_path(ref, stage))
        make_below(self._root, attempt_path(ref))
        write_durably(path, msgspec.json.encode(fields) + b"\n")

    def close(self) -> None:
        """Release the locks and take the nonce away. Twice is no error. Raises StoreError."""
        with self._lock:
            if self._log is not None:
                self._log.close()
                self._log = None
            if self._store_lock_fd >= 0:
                os.close(self._store_lock_fd)
                self._store_lock_fd = -1
        if self._nonce_path:
            with naming("remove", self._nonce_path):
                remove_if_there(self._nonce_path)

    def _lock_store(self) -> None:
        """Share the lock that gc wants for itself alone. Twice is no error."""
        if self._store_lock_fd >= 0:
            return
        path = os.path.join(self._root, INVARIANT_NAME)
        with naming("lock", path):
            self._store_lock_fd = os.open(path, os.O_RDONLY)
            if not try_lock(self._store_lock_fd, exclusive=False):
                raise Refused(f"{self._root} is being swept by `stagetap verify --gc`: wait for it")

    def _new_log(self) -> LogWriter:
        name = new_writer_name()
        self._own_writers.add(name)
        return LogWriter(os.path.join(self._root, COMMITS), name)

    def _poll(self) -> None:
        """Learn of all deletions and of others' commits up to now. The lock is held."""
        # Not of our own: a line that is being appended may still be taken back.
        commits, deletes = self._ledger.poll(self._own_writers)
        for commit in commits:
            key = (commit.run_id, commit.sample_id)
            self._attempts.setdefault(key, set()).add(commit.attempt)
        for deletion in deletes:
            key = (deletion.run_id, deletion.sample_id)
            attempts = self._attempts.get(key, set())
            attempts.discard(deletion.attempt)
            if not attempts:
                self._attempts.pop(key, None)

    def _check_fragments(self, manifest: Manifest) -> None:
        """Raise StoreError unless every fragment lies here in its full size."""
        for fragment in manifest.fragments:
            path = os.path.join(self._root, fragment.path)
            with naming("find the fragment", path, fragment.file_bytes):
                found_bytes = os.stat(path).st_size
            if found_bytes != fragment.file_bytes:
                raise StoreError(
                    f"{path} has {found_bytes} bytes, stage {fragment.stage} reported "
                    f"{fragment.file_bytes}: capture the sample again",
                    path=path,
                    size_bytes=found_bytes,
                )


def _check_kind(invariant: Invariant, manifest: Manifest) -> None:
    found = difference(invariant, kind_of(manifest.tapped))
    if found is not None:
        field, ours, theirs = found
        raise MalformedManifest(
            f"manifest of sample {manifest.sample_id!r}: {field} is {theirs}, the store was begun "
            f"with {ours}: restart the engine",
            sample_id=manifest.sample_id,
        )
