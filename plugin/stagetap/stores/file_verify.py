"""Look at every byte of a file store, and sweep what no commit names."""

import os
from collections.abc import Callable

from stagetap.errors import Refused, StageTapError, StoreError
from stagetap.stores.base import CommitEntry, file_root
from stagetap.stores.file_io import SCRATCH_PREFIX, listed, naming, remove_if_there, try_lock
from stagetap.stores.file_layout import COMMITS, INVARIANT_NAME, LOG_SUFFIX, NONCES, TOP_LEVEL
from stagetap.stores.file_reader import FileStoreReader
from stagetap.stores.file_removal import attempt_directory, is_ours, remove_attempt
from stagetap.stores.verify_report import Orphan, Problem, VerifyReport, check_sample


def verify_store(
    uri: str | os.PathLike[str],
    checksums: bool = True,
    gc: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check all samples of a store; with `gc`, remove what no commit names.

    `progress(done, total)` is called after every sample. Raises ForeignStore, UnknownVersion,
    StoreError, and with `gc` Refused while a writer lives or while a log cannot be read.
    """
    root = file_root(uri)
    reader = FileStoreReader(root)
    lock_fd = _lock_for_sweeping(root) if gc else -1
    try:
        return _verify(root, reader, checksums, gc, progress)
    finally:
        if gc:
            os.close(lock_fd)


def _verify(
    root: str,
    reader: FileStoreReader,
    checksums: bool,
    gc: bool,
    progress: Callable[[int, int], None] | None,
) -> VerifyReport:
    report = VerifyReport(live_writers=_live_writers(root))
    if gc and report.live_writers:
        # Their lock on the store may be lost: somebody may have put stagetap.json back from a copy.
        raise Refused(
            f"{root} is in use by {', '.join(report.live_writers)}: sweep it when that has ended"
        )
    try:
        commits, deletes = reader.poll()
    except StoreError as error:
        if gc:
            raise Refused(f"nothing was swept, the commits cannot all be read: {error}") from error
        # Without all the commits nothing can be said about what is whole or left over.
        report.problems.append(Problem(kind=type(error).__name__, message=str(error)))
        return report
    gone = {(d.run_id, d.sample_id, d.attempt) for d in deletes}
    kept = [c for c in commits if (c.run_id, c.sample_id, c.attempt) not in gone]
    winners, report.duplicates = _winners(kept)
    for done, entry in enumerate(winners, start=1):
        try:
            check_sample(reader, reader.manifest(entry), checksums, report)
        except StageTapError as error:
            report.note(error, entry.run_id, entry.sample_id)
        if progress is not None:
            progress(done, len(winners))
    named = {attempt_directory(entry) for entry in kept}
    report.orphans = _orphans(root, named, with_nonces=not report.live_writers)
    if gc:
        report.swept_bytes = _sweep(root, report.orphans)
    return report


def _winners(commits: list[CommitEntry]) -> tuple[list[CommitEntry], list[CommitEntry]]:
    """The earliest commit of every sample id, and the others."""
    seen: set[tuple[str, str]] = set()
    winners: list[CommitEntry] = []
    others: list[CommitEntry] = []
    for entry in sorted(commits, key=lambda entry: entry.order):
        key = (entry.run_id, entry.sample_id)
        (others if key in seen else winners).append(entry)
        seen.add(key)
    return winners, others


def _live_writers(root: str) -> list[str]:
    """The writers whose log is locked, which is as long as they live."""
    live = []
    for name in listed(os.path.join(root, COMMITS)):
        path = os.path.join(root, COMMITS, name)
        if name.endswith(LOG_SUFFIX):
            with naming("lock", path):
                fd = os.open(path, os.O_RDONLY)
                try:
                    if not try_lock(fd, exclusive=False):
                        live.append(name.removesuffix(LOG_SUFFIX))
                finally:
                    os.close(fd)
    return live


def _lock_for_sweeping(root: str) -> int:
    """Keep all writers out; return the open file that does so. Raises Refused or StoreError."""
    path = os.path.join(root, INVARIANT_NAME)
    with naming("lock", path):
        fd = os.open(path, os.O_RDWR)
    try:
        with naming("lock", path):
            if try_lock(fd, exclusive=True):
                return fd
        writers = ", ".join(_live_writers(root)) or "another process"
        raise Refused(f"{root} is in use by {writers}: sweep it when that has ended")
    except BaseException:
        os.close(fd)
        raise


def _orphans(root: str, named: set[str], with_nonces: bool) -> list[Orphan]:
    """Attempts that no commit names, scratch files, and nonces of engines that have ended."""
    attempts = [
        os.path.join(run, sample, attempt)
        for run in _directories(root)
        if run not in TOP_LEVEL
        for sample in _directories(os.path.join(root, run))
        for attempt in _directories(os.path.join(root, run, sample))
    ]
    paths = [
        path for path in attempts if path not in named and is_ours(listed(os.path.join(root, path)))
    ]
    if with_nonces:
        paths += [os.path.join(NONCES, name) for name in listed(os.path.join(root, NONCES))]
    paths += [name for name in listed(root) if name.startswith(SCRATCH_PREFIX)]
    return [Orphan(path=path, size_bytes=_size_bytes(os.path.join(root, path))) for path in paths]


def _directories(path: str) -> list[str]:
    """The real directories in `path`; a link may lead to what is not ours."""
    children = [(name, os.path.join(path, name)) for name in listed(path)]
    return [name for name, child in children if os.path.isdir(child) and not os.path.islink(child)]


def _size_bytes(path: str) -> int:
    """The bytes of a file, or of the files in a directory; what vanishes meanwhile has none."""
    paths = [os.path.join(path, name) for name in listed(path)] or [path]
    return sum(os.path.getsize(each) for each in paths if os.path.isfile(each))


def _sweep(root: str, orphans: list[Orphan]) -> int:
    for orphan in orphans:
        path = os.path.join(root, orphan.path)
        if os.path.isdir(path):
            remove_attempt(root, orphan.path)
        else:
            with naming("remove", path):
                remove_if_there(path)
    return sum(orphan.size_bytes for orphan in orphans)
