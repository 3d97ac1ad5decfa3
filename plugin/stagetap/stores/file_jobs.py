"""What ``stagetap capture`` was asked for in a run: ``DIR/jobs/<run>.json``.

A manifest says what a sample holds, and not what was asked: a sample with fewer output tokens than
asked for may have ended by itself. So the job that captured a run leaves this note, and the one
that goes on with it must ask for the same.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from stagetap.errors import StoreError
from stagetap.keys import component
from stagetap.stores.file_io import make_below, naming, write_durably
from stagetap.stores.file_layout import JOBS


class CaptureNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What decides the rows and the values of every sample of a run, as it was asked for.

    ``engine_args`` are those of vLLM's arguments that do, under their names.
    """

    include_output: int
    engine_args: dict[str, Any]


def read_note(root: str, run_id: str) -> CaptureNote | None:
    """The note of a run, None where there is none. Raises StoreError."""
    path = _path(root, run_id)
    with naming("read", path):
        try:
            with open(path, "rb") as file:
                text = file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None
    try:
        return msgspec.json.decode(text, type=CaptureNote)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise StoreError(
            f"{path} cannot be read ({error}): restore it, or choose another --run", path=path
        ) from error


def write_note(root: str, run_id: str, note: CaptureNote) -> None:
    """Leave the note, whole and durable, in a store that is there. Raises StoreError."""
    make_below(root, JOBS)
    text = msgspec.json.format(msgspec.json.encode(note), indent=2) + b"\n"
    write_durably(_path(root, run_id), text)


def _path(root: str, run_id: str) -> str:
    return os.path.join(root, JOBS, f"{component(run_id)}.json")
