"""How a refusal at start reaches a person.

vLLM starts in several processes and surrounds what one of them raises with a traceback and a
message of its own. The line below is what a user needs, so it goes to the process's own stderr,
unprefixed, or into the report of the StageTap command that prints it at its end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process

from stagetap.engine.report import note_refusal
from stagetap.errors import StageTapError


class StartRefused(StageTapError):
    """vLLM must not start. No ValueError, which pydantic would wrap in one of its own."""


FRONT_END_ENV = "STAGETAP_FRONT_END"
"""Set by ``stagetap serve`` to the pid of the process that becomes the server."""

REFUSED_EXIT = 2
"""Exit code of a ``stagetap`` command that was refused."""


@contextmanager
def announced(*, ends_core: bool = False) -> Iterator[None]:
    """Print ``stagetap: refused: ...`` for a StageTapError raised inside.

    Args:
        ends_core: the process, if it is a child, is the engine's core, which has nothing to lose.

    Raises:
        StartRefused: in its place.
        SystemExit: in the core of an engine that a StageTap command has started. That command says
            what was refused; an exception vLLM would log with its traceback, and Python once more.
    """
    try:
        yield
    except StageTapError as error:
        if not note_refusal(error):
            # Not sys.stderr, whose lines vLLM prefixes with the process's name.
            os.write(2, f"stagetap: refused: {error}\n".encode())
        elif ends_core and parent_process() is not None:
            raise SystemExit(REFUSED_EXIT) from None
        if os.environ.get(FRONT_END_ENV) == str(os.getpid()):
            os._exit(REFUSED_EXIT)  # it owns no process yet, and a traceback would bury the line
        raise StartRefused(str(error)) from error
