"""Rows that are written from their pages: the same bytes, no slot, and pages kept until the end."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from stagetap.errors import StoreError
from stagetap.publish import publisher as module
from stagetap.publish.publisher import FragmentJob, Publisher
from store_samples import drain, job, states
from unit.publish.memory_store import ROW_BYTES, WHAT, Hang, MemoryStore, fail, make_publisher, ref
from unit.publish.test_cancel import Seen


def direct(sample_id: str, tokens: int, piece_rows: int) -> FragmentJob:
    """A job whose rows lie in pieces, and must not be gathered."""
    made = job(WHAT, ref(sample_id), 1, tokens)
    rows = torch.stack([states(k, tokens) for k in (4, 6)], dim=1).bfloat16()  # [T, 2, H]

    def pieces(start: int, end: int) -> list[torch.Tensor]:
        return list(rows[start:end].split(piece_rows))

    return replace(made, pieces=pieces, gather=fail(AssertionError("gathered")))


@pytest.fixture
def large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a few rows make up is large enough."""
    monkeypatch.setattr(module, "SMALLEST_PIECE_BYTES", ROW_BYTES)


@pytest.mark.usefixtures("large_pieces")
@pytest.mark.parametrize("largest", [1, 3 * ROW_BYTES, 1 << 20])
def test_the_same_bytes_without_a_slot(
    store: MemoryStore, publisher: Publisher, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    monkeypatch.setattr(module, "LARGEST_WRITE_BYTES", largest)
    in_use: list[int] = []
    store.on_write = lambda header, number: in_use.append(publisher.pool.in_use)
    publisher.submit(direct("direct", 20, 2))
    (one,) = drain(publisher, 1)
    assert one.error is None
    assert set(in_use) == {0}
    publisher.submit(job(WHAT, ref("staged"), 1, 20))
    (other,) = drain(publisher, 1)
    assert store.data["direct", 1] == store.data["staged", 1]
    assert one.fragment is not None
    assert other.fragment is not None
    assert one.fragment.checksum == other.fragment.checksum


def test_small_pieces_go_through_a_slot(store: MemoryStore, publisher: Publisher) -> None:
    made = replace(direct("s", 20, 2), gather=job(WHAT, ref(), 1, 20).gather)
    in_use: list[int] = []
    store.on_write = lambda header, number: in_use.append(publisher.pool.in_use)
    publisher.submit(made)
    assert drain(publisher, 1)[0].error is None
    assert in_use == [1, 1, 1, 1, 1]


@pytest.mark.usefixtures("large_pieces")
def test_pages_are_kept_for_a_hung_write_of_a_dead_attempt(
    store: MemoryStore, publisher: Publisher
) -> None:
    hang = Hang()
    store.on_write = lambda header, number: hang()
    seen = Seen(publisher)
    publisher.submit(direct("s", 20, 5))
    hang.wait_entered()
    publisher.cancel(ref("s"))
    seen.poll()
    assert seen.staged == [], "the write may still read them"
    assert publisher.status().hung_writes == 1
    assert publisher.status().quarantined_slots == 0
    hang.let_go()
    seen.until(lambda: publisher.busy() == 0)
    seen.poll()
    assert seen.staged == [ref("s")]
    assert seen.errors == {"s": "Cancelled: cancelled while it was being written"}
    assert store.aborted == ["s"]


@pytest.mark.usefixtures("large_pieces")
def test_pages_are_free_when_the_last_write_has_returned_or_failed(
    store: MemoryStore, publisher: Publisher
) -> None:
    finish = Hang()
    store.on_finish = lambda header: finish()
    seen = Seen(publisher)
    publisher.submit(direct("s", 20, 5))
    finish.wait_entered()
    seen.until(lambda: bool(seen.staged))
    assert seen.reports == []
    finish.let_go()
    seen.until(lambda: bool(seen.reports))
    store.on_write = fail(StoreError("no"))
    publisher.submit(direct("t", 20, 5))
    seen.until(lambda: len(seen.reports) == 2)
    assert seen.staged == [ref("s"), ref("t")]
    assert seen.errors == {"s": None, "t": "StoreError: no"}


@pytest.mark.usefixtures("large_pieces")
@pytest.mark.parametrize(("spoil", "said"), [(3, "token 3 of 20"), (17, "token 17 of 20")])
def test_a_nan_is_found_where_it_is(store: MemoryStore, spoil: int, said: str) -> None:
    made = direct("s", 20, 6)
    pieces: Callable[[int, int], list[torch.Tensor]] | None = made.pieces
    assert pieces is not None
    pieces(spoil, spoil + 1)[0][0, 1, 5] = torch.nan
    publisher = make_publisher(store, refuse_nonfinite=True)
    publisher.submit(made)
    (report,) = drain(publisher, 1)
    assert report.error is not None
    assert said in report.error
    assert "layer 6 is NaN" in report.error
    assert store.aborted == ["s"]
    assert store.data == {}
    publisher.shutdown(5)


def test_without_a_checksum_the_manifest_says_none(store: MemoryStore) -> None:
    publisher = make_publisher(store, checksum="none")
    publisher.submit(job(WHAT, ref(), 1, 5))
    (report,) = drain(publisher, 1)
    assert report.fragment is not None
    assert report.fragment.checksum == "none"
    publisher.shutdown(5)
