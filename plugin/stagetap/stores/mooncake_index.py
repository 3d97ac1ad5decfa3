"""The index of a run: who writes it, its pages, and how to find them without listing keys."""

import time
from dataclasses import dataclass
from functools import partial

from stagetap.errors import CorruptLog, StoreError
from stagetap.stores.mooncake_layout import (
    MARK_EVERY,
    PAGE_WINDOW,
    WRITER_WINDOW,
    mark_keys,
    next_position,
    page_key,
    writer_key,
)
from stagetap.stores.mooncake_objects import Objects, create, put_when_there_is_room, read
from stagetap.stores.mooncake_records import (
    Mark,
    Page,
    WriterRecord,
    decode_record,
    encode_record,
    is_intact,
)

LOOK_SECONDS = 0.5
"""How often a reader that finds no new page looks for new writers and for pages far ahead."""


@dataclass(frozen=True)
class Writers:
    """Who has introduced itself to a run, and what could not be read of it."""

    records: tuple[WriterRecord, ...]
    damage: tuple[CorruptLog, ...]


def read_writers(objects: Objects, run_id: str) -> Writers:
    """All committers of a run. Raises StoreError.

    One damaged record hides no other: its committer puts it anew, see :meth:`IndexWriter.is_known`.
    """
    records: list[WriterRecord] = []
    damage: list[CorruptLog] = []
    start = 0
    while True:
        keys = [writer_key(run_id, n) for n in range(start, start + WRITER_WINDOW)]
        there = [key for key, exists in zip(keys, objects.exist(keys), strict=True) if exists]
        if not there:
            return Writers(tuple(records), tuple(damage))
        for key in there:
            data = read(objects, key)
            if data is None:
                continue
            if is_intact(key, data):
                records.append(decode_record(key, data, WriterRecord))
            else:
                damage.append(
                    CorruptLog(
                        f"{key} is damaged, and so nothing of that engine is found: with the next "
                        "sample that it commits it puts it right; ask again",
                        path=key,
                    )
                )
        start += WRITER_WINDOW


class IndexWriter:
    """Appends pages to the index of one run, from one thread at a time."""

    def __init__(
        self, objects: Objects, run_id: str, record: WriterRecord, room_timeout_s: float
    ) -> None:
        """`room_timeout_s`: how long to wait for room in a full store."""
        self._objects = objects
        self._run_id = run_id
        self._record = record
        self._room_timeout_s = room_timeout_s
        self._key: str | None = None  # where this writer has introduced itself
        self.next_seq = 0

    @property
    def writer(self) -> str:
        """The id of this writer."""
        return self._record.writer

    @property
    def nonce(self) -> str:
        """The nonce with which this writer introduced itself."""
        return self._record.nonce

    def introduce(self) -> None:
        """Take the first free writer number. Raises StoreError."""
        start = 0
        while True:
            keys = [writer_key(self._run_id, n) for n in range(start, start + WRITER_WINDOW)]
            exists = self._objects.exist(keys)
            for key, taken in zip(keys, exists, strict=True):
                if not taken and self._is_first(key):
                    self._key = key
                    return
            start += WRITER_WINDOW

    def is_known(self) -> bool:
        """Whether readers find this writer: a master that restarts forgets everything.

        What introduces it is put anew where it is damaged, and how many pages it has, which was
        stored beside it. That was seen: a write that a dead link holds up reaches memory long after
        it was given to other objects. Raises StoreError.
        """
        if self._key is None:
            return False
        found = read(self._objects, self._key)
        if found is not None and not is_intact(self._key, found):
            self._objects.remove([self._key], force=True)
            self.introduce()
            self._mark(self.next_seq)
            return True
        return found == encode_record(self._key, self._record)

    def append(self, page: Page) -> None:
        """Store a page: readers see it from here on. Raises StoreError, StoreFull.

        A page that could not be stored leaves its number unused, as if it had been consumed: the
        put may still have happened, and two pages of one number would be one page too few.
        """
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        if seq % MARK_EVERY == 0:
            self._mark(seq)
        key = page_key(self._run_id, self.writer, seq)
        data = encode_record(key, page)
        self._put(key, data)
        if read(self._objects, key) not in (data, None):  # None: consumed at once
            raise StoreError(f"{key} exists already: two engines have one writer id", path=key)

    def _mark(self, pages: int) -> None:
        """Note how many pages there are. One of two places stays valid while the other changes."""
        key = mark_keys(self._run_id, self.writer)[pages // MARK_EVERY % 2]
        self._objects.remove([key], force=True)
        self._put(key, encode_record(key, Mark(pages=pages)))

    def _is_first(self, key: str) -> bool:
        ours = encode_record(key, self._record)
        return create(self._objects, key, ours, self._room_timeout_s) == ours

    def _put(self, key: str, data: bytes) -> None:
        put = partial(self._objects.put, key, data)
        put_when_there_is_room(put, self._room_timeout_s, key)


@dataclass(frozen=True)
class FoundPage:
    """A page, and where it is. `stretch` is the first page of those before it without a gap."""

    writer: str
    seq: int
    stretch: int
    page: Page


@dataclass
class _Position:
    seq: int = 0  # the next page to look for
    stretch: int = 0
    stretch_end: int = 0


class IndexReader:
    """Reads on, from where it stood, in the indexes of all writers of a run."""

    def __init__(self, objects: Objects, run_id: str) -> None:
        self._objects = objects
        self._run_id = run_id
        self._positions: dict[str, _Position] = {}
        self._found: list[FoundPage] = []  # not returned yet
        self._looked = float("-inf")
        self._told: set[str | None] = set()  # keys that are damaged, and were raised

    def poll(self) -> list[FoundPage]:
        """The pages that were not returned yet, per writer in order. Raises StoreError, CorruptLog.

        After a StoreError the next call goes on where this one stopped, after a CorruptLog behind
        the page that is damaged: no other page is lost. Each thing that is damaged raises once.
        """
        for writer in self._positions:
            self._read_on(writer)
        now = time.monotonic()
        if not self._found and now - self._looked >= LOOK_SECONDS:
            writers = read_writers(self._objects, self._run_id)
            damage = list(writers.damage)
            for record in writers.records:
                self._positions.setdefault(record.writer, _Position())
            for writer in self._positions:
                known_pages = 0
                try:
                    known_pages = self._marked_pages(writer)
                except CorruptLog as error:
                    damage.append(error)
                self._read_on(writer, known_pages)
            self._looked = now
            # Before what was found: that it is all there is would be a mistake.
            new = [error for error in damage if error.path not in self._told]
            self._told = {error.path for error in damage} - {error.path for error in new[1:]}
            if new:
                raise new[0]
        found, self._found = self._found, []
        return found

    def _read_on(self, writer: str, known_pages: int = 0) -> None:
        """Take pages from the writer's position on; it has at least `known_pages`."""
        position = self._positions[writer]
        while True:
            start = position.seq
            keys = [page_key(self._run_id, writer, start + n) for n in range(PAGE_WINDOW)]
            there, advance = next_position(self._objects.exist(keys))
            for offset in there:
                self._take(writer, position, start + offset, keys[offset])
            if not advance:
                if start >= known_pages:
                    return
                # All of these were written, and are gone.
                position.seq = min(start + PAGE_WINDOW, known_pages)

    def _take(self, writer: str, position: _Position, seq: int, key: str) -> None:
        data = read(self._objects, key)
        position.seq = seq + 1
        if data is None:
            return  # consumed since
        page = decode_record(key, data, Page)
        if seq != position.stretch_end:
            position.stretch = seq
        position.stretch_end = seq + 1
        self._found.append(FoundPage(writer, seq, position.stretch, page))

    def _marked_pages(self, writer: str) -> int:
        """How many pages a writer has at least. Of its two marks one has to be whole."""
        marks = [(key, read(self._objects, key)) for key in mark_keys(self._run_id, writer)]
        there = [(key, data) for key, data in marks if data is not None]
        whole = [(key, data) for key, data in there if is_intact(key, data)]
        if there and not whole:
            key = there[0][0]
            raise CorruptLog(
                f"{key} is damaged: pages behind many that are gone may not be found until the "
                f"engine has committed {MARK_EVERY} more; ask again",
                path=key,
            )
        return max((decode_record(key, data, Mark).pages for key, data in whole), default=0)
