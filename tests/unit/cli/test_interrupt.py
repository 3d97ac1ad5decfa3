"""Ctrl-C: first a wish, then an interrupt; and the processes of an engine never see it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time

import pytest

from stagetap.cli.interrupt import Interruption


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def press_and_wait() -> None:
    """A main thread that waits for an engine which does not answer is woken."""
    press()
    queue.SimpleQueue[None]().get(timeout=5)


def wait_until(interruption: Interruption) -> None:
    deadline = time.monotonic() + 5
    while not interruption.requested:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_outside_of_deferred_it_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), Interruption():
        press_and_wait()


def test_the_first_is_a_wish_and_the_second_interrupts() -> None:
    said: list[str] = []
    with Interruption(lambda: said.append("stopping")) as interruption, interruption.deferred():
        press()
        wait_until(interruption)
        assert said == ["stopping"]
        with pytest.raises(KeyboardInterrupt):
            press_and_wait()
    assert said == ["stopping"]


def test_everything_is_as_before_afterwards() -> None:
    with Interruption():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(KeyboardInterrupt):
        press_and_wait()


def test_processes_started_inside_are_spared() -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    with Interruption() as interruption, interruption.deferred():
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        os.killpg(child.pid, signal.SIGINT)
        time.sleep(0.3)
        assert child.poll() is None
        child.terminate()
        assert child.wait(10) == -signal.SIGTERM
        child.stdout.close()


def test_where_it_is_ignored_it_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption, interruption.deferred():
            press()
            time.sleep(0.3)
            assert not interruption.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
