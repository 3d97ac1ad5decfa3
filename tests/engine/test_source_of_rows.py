"""Which way a stage's rows go, and what it says of that at its start. No engine is started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stagetap.engine import worker_side as module
from stagetap.engine.pages import TapPages
from stagetap.engine.worker_side import WorkerSide
from stagetap.errors import StoreError


class Store:
    """Takes pages, or says why not."""

    def __init__(self, takes_pages: bool = True, refusal: str | None = None) -> None:
        self.takes_pages, self._refusal = takes_pages, refusal
        self.memory: list[memoryview] = []

    def use_memory(self, memory: memoryview) -> None:
        if self._refusal is not None:
            raise StoreError(self._refusal)
        self.memory.append(memory)


def chosen(
    monkeypatch: pytest.MonkeyPatch, store: Store, pages: TapPages, direct_pages: str = "auto"
) -> tuple[bool, str]:
    """Whether rows are stored from their pages, and the line in the log."""
    said: list[str] = []
    monkeypatch.setattr(
        module, "logger", SimpleNamespace(info=lambda text, *values: said.append(text % values))
    )
    side: Any = SimpleNamespace(
        _options=SimpleNamespace(direct_pages=direct_pages), _store=store, _stage=1
    )
    WorkerSide._choose_source(side, pages)
    return side._stores_from_pages, said[0]


@pytest.fixture
def pages() -> TapPages:
    return TapPages.of([torch.zeros(6, 2, 4, 8)], (2, 8))


def test_straight_from_registered_pages(monkeypatch: pytest.MonkeyPatch, pages: TapPages) -> None:
    store = Store()
    assert chosen(monkeypatch, store, pages) == (True, "stagetap: stage 1 stores from its pages")
    assert [memory.nbytes for memory in store.memory] == [pages.nbytes]


@pytest.mark.parametrize(
    ("store", "direct_pages", "why"),
    [
        (Store(), "off", "direct_pages is off"),
        (Store(takes_pages=False), "auto", "this store waits for a disk"),
        (Store(refusal="memory cannot be locked"), "auto", "memory cannot be locked"),
    ],
)
def test_through_slots_and_why(
    monkeypatch: pytest.MonkeyPatch, pages: TapPages, store: Store, direct_pages: str, why: str
) -> None:
    found = chosen(monkeypatch, store, pages, direct_pages)
    assert found == (False, f"stagetap: stage 1 stores through slots: {why}")
    assert store.memory == []


def test_rows_that_lie_apart_or_on_a_device_go_through_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    striped = TapPages.of([torch.zeros(6, 1, 4, 8)] * 2, (2, 8))
    assert "stripes of columns" in chosen(monkeypatch, Store(), striped)[1]
    elsewhere = TapPages.of([torch.zeros(6, 2, 4, 8, device="meta")], (2, 8))
    assert "the pages are on meta" in chosen(monkeypatch, Store(), elsewhere)[1]
