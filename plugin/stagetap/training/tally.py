"""How often a trainer asked for a row that had no sample, over all of its processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from stagetap.stores.file_io import naming

_FOUND, _MISSED = b"+", b"-"


class Tally:
    """One mark a row that was asked for, in a temporary file. May be pickled, to be shared.

    Marks of several processes do not mix: each is one byte that is appended.
    """

    def __init__(self) -> None:
        """Raises StoreError when there is no room for temporary files."""
        with naming("write", tempfile.gettempdir()):
            file, name = tempfile.mkstemp(prefix="stagetap-rows-")
            os.close(file)
        self._path = Path(name)

    def note(self, found: bool) -> None:
        """One row more. Raises StoreError."""
        with naming("write", str(self._path)), self._path.open("ab") as file:
            file.write(_FOUND if found else _MISSED)

    def missed(self) -> int:
        """Rows without a sample so far. Raises StoreError."""
        return self._marks().count(_MISSED)

    def asked(self) -> int:
        """Rows so far. Raises StoreError."""
        return len(self._marks())

    def in_vain(self, rows: int) -> bool:
        """Whether each of the last so many rows had none. Raises StoreError."""
        with naming("read", str(self._path)), self._path.open("rb") as file:
            file.seek(max(0, self._path.stat().st_size - rows))
            return file.read(rows) == rows * _MISSED

    def remove(self) -> None:
        """When nobody asks any more."""
        self._path.unlink(missing_ok=True)

    def _marks(self) -> bytes:
        with naming("read", str(self._path)):
            return self._path.read_bytes()
