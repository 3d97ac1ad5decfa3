"""Running a command of ours in a process of its own, whose words end up in a log."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stagetap.errors import StageTapError
from stagetap.stores.file_io import naming

_END_SECONDS = 20.0


def run_module(
    module: str, *arguments: object, log: Path, environment: Mapping[str, str] | None = None
) -> str:
    """Run ``python -m module`` to its end and return what it printed.

    Args:
        log: where its stderr goes.
        environment: all of the child's; this process's when absent.

    Raises:
        StageTapError: it failed; the message has its last words. Or the log cannot be written.
    """
    with naming("write", str(log)):
        errors = log.open("wb")
    with errors:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        said, _ = child.communicate()
    except BaseException:
        child.terminate()  # it ends what it has started, which nobody else knows
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    if child.returncode:
        lines = log.read_text("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        last = lines[-1].removeprefix("stagetap: error: ").removeprefix("stagetap: refused: ")
        raise StageTapError(f"{module} {arguments[0]}: {last} (exit {child.returncode}; {log})")
    return said
