"""The pool hands out slots in the order of tickets and never more than it has."""

import threading
import time
from collections.abc import Callable

import pytest

from stagetap.errors import Refused
from stagetap.publish.pool import (
    PoolClosed,
    SlotPool,
    check_slot_bytes,
    required_slot_bytes,
)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def waiting(pool: SlotPool) -> int:
    return len(pool._waiting)


def test_slots_are_distinct_memory_of_the_asked_size() -> None:
    pool = SlotPool(3, 100)
    slots = [pool.acquire(ticket) for ticket in range(3)]
    for slot in slots:
        assert slot.buffer.shape == (100,)
        slot.buffer.fill_(slot.index)
    assert [int(slot.buffer.sum()) for slot in slots] == [100 * slot.index for slot in slots]
    assert len({slot.index for slot in slots}) == 3
    assert pool.in_use == 3
    pool.release(slots[0])
    assert pool.in_use == 2


def test_the_lowest_ticket_is_served_first() -> None:
    pool = SlotPool(1, 8)
    held = pool.acquire(0)
    served: list[int] = []

    def take(ticket: int) -> None:
        slot = pool.acquire(ticket)
        served.append(ticket)
        pool.release(slot)

    threads = []
    for number, ticket in enumerate((5, 3, 9, 4)):
        threads.append(threading.Thread(target=take, args=(ticket,)))
        threads[-1].start()
        wait_until(lambda number=number: waiting(pool) == number + 1)
    pool.release(held)
    for thread in threads:
        thread.join(10)
    assert served == [3, 4, 5, 9]
    assert pool.waited_seconds > 0
    assert pool.in_use == 0


def test_closing_ends_every_wait() -> None:
    pool = SlotPool(1, 8)
    pool.acquire(0)
    errors: list[BaseException] = []

    def take() -> None:
        try:
            pool.acquire(1)
        except PoolClosed as error:
            errors.append(error)

    thread = threading.Thread(target=take)
    thread.start()
    wait_until(lambda: waiting(pool) == 1)
    pool.close()
    thread.join(10)
    assert len(errors) == 1
    with pytest.raises(PoolClosed):
        pool.acquire(2)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 8), (-1, 8), (1, 0)])
def test_a_pool_of_nothing_is_refused(slots: int, slot_bytes: int) -> None:
    with pytest.raises(Refused, match="at least 1"):
        SlotPool(slots, slot_bytes)


def test_a_row_must_fit_a_slot() -> None:
    check_slot_bytes(64, 64)
    check_slot_bytes(required_slot_bytes(65), 65)
    with pytest.raises(Refused, match="at least 65"):
        check_slot_bytes(64, 65)
