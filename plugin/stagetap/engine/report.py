"""What the processes of an engine leave for the command that started it: why one of them ended.

vLLM ends an engine with words such as "see root cause above", and the cause is in the log of
another process, dozens of lines up. A StageTap command names a file in the environment; what a
process refuses and the exceptions that vLLM logs are noted there, and the command's last line is
the first of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stagetap.engine.scratch import scratch_folder
from stagetap.engine.vllm_errors import with_cure
from stagetap.errors import StageTapError
from stagetap.wording import one_line, shortened

REPORT_FILE_ENV = "STAGETAP_REPORT_FILE"
"""Set by ``stagetap`` commands: where the processes of an engine note why they end."""

_REFUSED, _CAUSE = "refused: ", "cause: "
_CAUSE_CHARACTERS = 300

# vLLM's executor about a worker that raised nothing. What it raises itself thereafter is
# "cancelled", in another process.
_DIED, _KILLED = "died unexpectedly", "exit code: -9"


class EngineReport:
    """The notes of one engine's processes, in ``file``."""

    def __init__(self, file: Path):
        self._file = file

    def refusal(self) -> str | None:
        """What was refused first."""
        return self._first(_REFUSED)

    def cause(self) -> str | None:
        """The exception, or the death of a process, that was logged first, with a cure if known."""
        cause = self._first(_CAUSE)
        return None if cause is None else with_cure(cause)

    def forget(self) -> None:
        """Drop what was noted: an engine that goes on did not end for it."""
        self._file.unlink(missing_ok=True)

    def _first(self, kind: str) -> str | None:
        if not self._file.exists():
            return None
        lines = self._file.read_text("utf-8", "replace").splitlines()
        return next((line.removeprefix(kind) for line in lines if line.startswith(kind)), None)


@contextmanager
def engine_report() -> Iterator[EngineReport]:
    """While this is open, processes that are started note their ends."""
    before = os.environ.get(REPORT_FILE_ENV)
    with scratch_folder() as folder:
        file = folder / "report"
        os.environ[REPORT_FILE_ENV] = str(file)
        try:
            yield EngineReport(file)
        finally:
            del os.environ[REPORT_FILE_ENV]
            if before is not None:
                os.environ[REPORT_FILE_ENV] = before


def note_refusal(error: StageTapError) -> bool:
    """Note what this process refuses; False where no command has named a file."""
    return _note(_REFUSED, one_line(error))


def watch_log() -> None:
    """Note exceptions and deaths that vLLM logs in this process, if a command has named a file."""
    logger = logging.getLogger("vllm")
    if REPORT_FILE_ENV in os.environ and not any(
        isinstance(handler, _CauseHandler) for handler in logger.handlers
    ):
        logger.addHandler(_CauseHandler(logging.ERROR))


class _CauseHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            cause = f"{type(error).__name__}: {one_line(error)}"
        elif _DIED in (cause := record.getMessage()):
            if _KILLED in cause:
                cause += " It was killed; out of memory?"
        else:
            return
        _note(_CAUSE, shortened(cause, _CAUSE_CHARACTERS))


def _note(kind: str, text: str) -> bool:
    path = os.environ.get(REPORT_FILE_ENV)
    if path is None:
        return False
    line = f"{kind}{text}\n".encode()
    try:
        with open(path, "ab", buffering=0) as file:
            file.write(line)
    except OSError:
        return False  # the command has ended and its folder with it, or the disk is full
    return True
