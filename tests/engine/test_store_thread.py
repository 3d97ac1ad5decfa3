"""A thread that asks the store: in order, cancellable, never in the way of an exit."""

from __future__ import annotations

import threading

import pytest

from stagetap.engine.store_thread import StoreThread


def test_in_order_with_results_and_errors() -> None:
    done: list[int] = []
    committer = StoreThread("test")

    def work(number: int) -> int:
        done.append(number)
        if number == 1:
            raise OSError("disk")
        return number

    futures = [committer.submit(work, number) for number in range(3)]
    assert committer.shutdown(30)
    assert done == [0, 1, 2]
    assert futures[0].exception() is None
    assert isinstance(futures[1].exception(), OSError)
    assert futures[2].result() == 2


def test_what_has_not_begun_can_be_cancelled_and_what_hangs_does_not_hold_the_exit() -> None:
    begun, release = threading.Event(), threading.Event()
    committer = StoreThread("test")

    def hang() -> None:
        begun.set()
        release.wait(30)

    hung = committer.submit(hang)
    behind = committer.submit(pytest.fail, "it ran")
    assert begun.wait(30)
    assert not hung.cancel()
    assert behind.cancel()
    assert not committer.shutdown(0.05)
    release.set()
    hung.result(30)
