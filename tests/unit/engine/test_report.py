"""What the processes of an engine leave for the command that started it."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Iterator

import pytest

from stagetap.engine.refusal import REFUSED_EXIT, StartRefused, announced
from stagetap.engine.report import REPORT_FILE_ENV, engine_report, watch_log
from stagetap.errors import Refused


@pytest.fixture(autouse=True)
def vllm_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """vLLM's logger, as it was before and will be again."""
    monkeypatch.delenv(REPORT_FILE_ENV, raising=False)
    logger = logging.getLogger("vllm")
    before = list(logger.handlers)
    yield logger
    logger.handlers[:] = before


def log(text: str) -> None:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        logging.getLogger("vllm.v1.engine").exception("EngineCore encountered a fatal error.")


def test_the_first_exception_is_the_cause(vllm_log: logging.Logger) -> None:
    with engine_report() as report:
        watch_log()
        watch_log()
        assert report.cause() is None
        logging.getLogger("vllm").error("no exception")
        log("head_dim=16\nis too small")
        log("see the root cause above")
        assert report.cause() == "RuntimeError: head_dim=16 is too small"
        assert report.refusal() is None
        report.forget()
        assert report.cause() is None
    log("nobody waits any more")
    assert REPORT_FILE_ENV not in os.environ


def test_a_worker_that_died_is_the_cause(vllm_log: logging.Logger) -> None:
    with engine_report() as report:
        watch_log()
        said = "Worker proc %s died unexpectedly (exit code: %s), shutting down executor."
        logging.getLogger("vllm.v1.executor").error(said, "VllmWorker-1", -9)
        log("cancelled")
        assert report.cause() == (
            "Worker proc VllmWorker-1 died unexpectedly (exit code: -9), shutting down executor. "
            "It was killed; out of memory?"
        )


def test_nobody_listens_where_no_command_waits(vllm_log: logging.Logger) -> None:
    handlers = list(vllm_log.handlers)
    watch_log()
    assert vllm_log.handlers == handlers


def test_a_refusal_is_for_the_command_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with engine_report() as report:
        with pytest.raises(StartRefused), announced():
            raise Refused("layers:\nnone")
        assert report.refusal() == "layers: none"
    assert capfd.readouterr().err == ""
    with pytest.raises(StartRefused), announced():
        raise Refused("layers: none")
    assert capfd.readouterr().err == "stagetap: refused: layers: none\n"


def _core() -> None:
    with announced(ends_core=True):
        raise Refused("layers: none")


def test_the_core_of_an_engine_refuses_without_a_traceback(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with engine_report() as report:
        core = multiprocessing.get_context("fork").Process(target=_core)
        core.start()
        core.join(30)
        assert core.exitcode == REFUSED_EXIT
        assert report.refusal() == "layers: none"
        assert capfd.readouterr().err == ""
        with pytest.raises(StartRefused):  # a core within its caller
            _core()


def test_reports_nest() -> None:
    with engine_report() as outer:
        with engine_report() as inner, pytest.raises(StartRefused), announced():
            raise Refused("inner")
        with pytest.raises(StartRefused), announced():
            raise Refused("outer")
        assert inner.refusal() is None  # its folder is gone
        assert outer.refusal() == "outer"
