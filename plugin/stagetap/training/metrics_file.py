"""What speculators' trainer reports of its steps, as lines of JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from stagetap.errors import Refused
from stagetap.stores.file_io import naming

_LOGGER = "speculators.metrics"


class MetricsFile(logging.Handler):
    """Appends every report of the trainer to a file, each number with all of its digits.

    A line has ``train`` or ``val`` with the loss and what belongs to it, ``epoch``, and for a step
    of training ``global_step``, ``lr`` and ``profile``.
    """

    def __init__(self, path: Path) -> None:
        """Raises Refused when the file cannot be written."""
        super().__init__()
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise Refused(
                f"--stagetap-metrics {path} cannot be written ({error.strerror}): name another file"
            ) from error

    def emit(self, record: logging.LogRecord) -> None:
        """Write a report; what is none is passed over. Raises StoreError."""
        if isinstance(record.msg, Mapping):
            with naming("write", self._file.name):
                self._file.write(json.dumps(record.msg) + "\n")
                self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        super().close()


def write_metrics_to(path: Path) -> None:
    """From now on, in this process. Raises Refused."""
    logging.getLogger(_LOGGER).addHandler(MetricsFile(path))
