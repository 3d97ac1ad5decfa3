"""Look at every byte of a Mooncake run, and sweep what no commit names.

The index leads to all samples. What it does not lead to, such as fragments of an engine that was
killed, only the master can name, on its own HTTP server.
"""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

from stagetap.errors import CorruptLog, Refused, SampleNotFound, StageTapError, StoreError
from stagetap.keys import attempt_key, component
from stagetap.stores.base import CommitEntry
from stagetap.stores.mooncake_layout import invariant_key, ref_of
from stagetap.stores.mooncake_objects import read
from stagetap.stores.mooncake_reader import MooncakeStoreReader
from stagetap.stores.mooncake_records import Page, decode_commit, decode_record, is_intact
from stagetap.stores.verify_report import Orphan, VerifyReport, check_sample

SETTLE_SECONDS = 150.0
"""How long something must have been left over: longer than `publish_timeout_s`, after which no
attempt is committed any more. Nothing else tells whether an engine is at work."""

_HTTP_SECONDS = 10.0

ListKeys = Callable[[], list[str]]


def listing(metrics: str) -> ListKeys:
    """Lists all keys of the master whose HTTP server is at `metrics`: `host:port`, or a URL."""
    address = metrics.removeprefix("http://").removesuffix("/metrics")

    def list_keys() -> list[str]:
        url = f"http://{address}/get_all_keys"
        try:
            with urllib.request.urlopen(url, timeout=_HTTP_SECONDS) as answer:
                return str(answer.read().decode()).split()
        except (OSError, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise StoreError(
                f"{url}: {reason}: give the metrics address that `stagetap store up` prints"
            ) from error

    return list_keys


def verify_run(
    reader: MooncakeStoreReader,
    list_keys: ListKeys | None,
    *,
    checksums: bool,
    gc: bool,
    progress: Callable[[int, int], None] | None = None,
    settle_s: float = SETTLE_SECONDS,
) -> VerifyReport:
    """Check the samples of a run that are not consumed meanwhile.

    With `list_keys` the report names what no commit names; with `gc` that is removed, if it still
    is there after `settle_s`. Raises StoreError, and Refused when the keys are another master's.
    """
    report = VerifyReport()
    commits = _commits(reader, report)
    for done, entry in enumerate(commits, start=1):
        try:
            check_sample(reader, reader.manifest(entry), checksums, report)
        except SampleNotFound:
            pass  # consumed
        except StageTapError as error:
            report.note(error, entry.run_id, entry.sample_id)
        if progress is not None:
            progress(done, len(commits))
    if list_keys is not None:
        leftovers = _leftovers(reader, list_keys())
        if gc and leftovers:
            time.sleep(settle_s)
            leftovers &= _leftovers(reader, list_keys())
        report.orphans = _orphans(reader, leftovers)
        if gc:
            # Pages last: until then they lead to the rest.
            for key in sorted(leftovers, key=_is_page):
                reader.connection.objects.remove([key], force=True)
            report.swept_bytes = sum(orphan.size_bytes for orphan in report.orphans)
    return report


def _commits(reader: MooncakeStoreReader, report: VerifyReport) -> list[CommitEntry]:
    """What the index tells of; what is damaged of it goes to the report. Raises StoreError."""
    while True:
        try:
            return list(reader.poll()[0])
        except CorruptLog as error:  # each thing that is damaged raises once
            report.note(error, reader.run_id, None)


def _leftovers(reader: MooncakeStoreReader, keys: Iterable[str]) -> set[str]:
    """The keys of a run that belong to no sample, and not to the run itself.

    A commit that no page tells of stays: the look of a retry puts it into the index, anew where its
    page is damaged, and so left over.
    """
    objects = reader.connection.objects
    ours = [key for key in keys if key.startswith(f"{component(reader.run_id)}/")]
    if invariant_key(reader.run_id) not in ours:
        raise Refused(
            f"run {reader.run_id!r} is not among the keys that were listed: --metrics is another "
            "master's; give the one that `stagetap store up` printed for this store"
        )
    told_of: dict[str, str | None] = {}  # by page: the attempt of a commit
    for key in filter(_is_page, ours):
        data = read(objects, key)
        if data is not None:
            page = decode_record(key, data, Page) if is_intact(key, data) else None
            told_of[key] = None if page is None else _committed_attempt(reader.run_id, page)
    named: set[str] = set()  # what keys of samples begin with, and their commits
    for key in filter(_is_commit, ours):
        data = read(objects, key)
        if data is not None and is_intact(key, data):
            ref = ref_of(decode_commit(key, data).manifest)
            if not reader.is_dying(ref):
                named |= {key, attempt_key(ref.run_id, ref.sample_id, ref.attempt)}
    leftovers = {key for key, attempt in told_of.items() if attempt not in named}
    for key in ours:
        of_a_sample = _is_commit(key) or key.count("/") > 2
        if of_a_sample and named.isdisjoint((key, _attempt(key))):
            leftovers.add(key)
    return leftovers


def _committed_attempt(run_id: str, page: Page) -> str | None:
    """What keys of the sample begin with that a page tells of; None for a failure."""
    return attempt_key(run_id, page.sample_id, page.attempt) if page.kind == "commit" else None


def _orphans(reader: MooncakeStoreReader, leftovers: set[str]) -> list[Orphan]:
    """What is left over, by attempt."""
    sizes: dict[str, int] = {}
    for key in sorted(leftovers):
        name = _attempt(key)
        sizes[name] = sizes.get(name, 0) + (reader.connection.objects.size(key) or 0)
    return [Orphan(path=name, size_bytes=size) for name, size in sizes.items()]


def _is_commit(key: str) -> bool:
    return key.count("/") == 2 and key.endswith("/commit")


def _is_page(key: str) -> bool:
    return key.count("/") == 2 and "/index/" in key and key.rpartition(".")[2].isdigit()


def _attempt(key: str) -> str:
    """`<run>/<sample>/<attempt>` of what lies under it; else the key itself."""
    return "/".join(key.split("/")[:3])
