"""Ctrl-C: first a wish, then the end; and the processes of an engine never see it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stagetap.cli.interrupt import INTERRUPTED_EXIT, Interruption
from stagetap.processes import warnings_but_of_tracker


class Pressed:
    """What an Interruption did, in order."""

    def __init__(self) -> None:
        self._done = queue.SimpleQueue[str]()
        self.interruption = Interruption(
            on_request=lambda: self._done.put("request"), end=lambda: self._done.put("end")
        )

    def press(self) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        return self._done.get(timeout=30)


def test_before_there_is_something_in_flight_it_ends() -> None:
    pressed = Pressed()
    with pressed.interruption:
        assert pressed.press() == "end"
        assert not pressed.interruption.requested


def test_the_first_is_a_wish_and_the_second_ends() -> None:
    pressed = Pressed()
    with pressed.interruption:
        pressed.interruption.defer()
        assert pressed.press() == "request"
        assert pressed.interruption.requested
        assert pressed.press() == "end"


def test_everything_is_as_before_afterwards() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Interruption():
        pass
    assert len(os.listdir("/proc/self/fd")) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert signal.set_wakeup_fd(-1) == -1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_processes_started_inside_are_spared() -> None:
    code = "import time; print('up', flush=True); time.sleep(60)"
    with Interruption():
        child = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
        )
    assert child.stdout is not None
    with child.stdout as stdout:
        assert stdout.readline() == b"up\n"
    os.killpg(child.pid, signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None
    child.terminate()
    assert child.wait(30) == -signal.SIGTERM


def test_where_it_is_ignored_it_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interruption() as interruption:
            interruption.defer()
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            assert not interruption.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


CHILDREN = """
import multiprocessing, signal, sys, time
from stagetap.cli.interrupt import Interruption
if __name__ == "__main__":
    if sys.argv[1:] == ["background"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Interruption():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
        print(child.pid, flush=True)
        try:
            time.sleep(60)
        except BaseException:
            time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "started"),
    [(signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["background"])],
)
def test_the_end_takes_the_processes_along(sent: signal.Signals, started: list[str]) -> None:
    command = [sys.executable, "-c", CHILDREN, *started]
    environment = {**os.environ, "PYTHONWARNINGS": warnings_but_of_tracker()}  # a child's options
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        child = int(parent.stdout.readline())
        deliver = os.killpg if sent is signal.SIGINT else os.kill  # A terminal reaches them all.
        deliver(parent.pid, sent)
        assert parent.wait(30) == INTERRUPTED_EXIT
        assert parent.stderr.read() == b"\nstagetap: interrupted\n"
    deadline = time.monotonic() + 30
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("given", [None, "default", "error::DeprecationWarning"])
@pytest.mark.parametrize(
    "opened", ["Interruption()", "os.environ.update(engine_environment(2, 1))"]
)
def test_what_a_killed_engine_leaves_is_no_last_word(given: str | None, opened: str) -> None:
    code = (
        "import multiprocessing, os, signal, sys\n"
        "from multiprocessing import shared_memory\n"
        "from stagetap.cli.interrupt import Interruption\n"
        "from stagetap.engine.environment import engine_environment\n"
        f"opened = {opened}\n"
        "if opened: opened.__enter__()\n"
        "context = multiprocessing.get_context('spawn')\n"
        "left = context.Semaphore(), shared_memory.SharedMemory(create=True, size=1)\n"
        "print(os.environ['PYTHONWARNINGS'])\n"
        "print('the cause', file=sys.stderr, flush=True)\n"
        "sys.stdout.flush()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {name: said for name, said in os.environ.items() if name != "PYTHONWARNINGS"}
    if given is not None:
        environment["PYTHONWARNINGS"] = given
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stderr == "the cause\n"
    silent = "ignore::UserWarning:multiprocessing.resource_tracker"
    assert done.stdout == (f"{given},{silent}\n" if given else f"{silent}\n")


def test_sigterm_cleans_up(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from stagetap import cli\n"
        "from stagetap.cli.folders import temporary_folder\n"
        "def app(**_):\n"
        "    with temporary_folder('stagetap-test-') as folder:\n"
        "        (folder / 'file').touch()\n"
        "        time.sleep(60)\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob("stagetap-test-*/file")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.terminate()
    assert child.communicate(timeout=30) == ("", "stagetap: interrupted\n")
    assert child.returncode == INTERRUPTED_EXIT
    assert os.listdir(tmp_path) == []
