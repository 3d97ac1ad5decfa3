"""The child process of :class:`engine.harness.Arm`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    spec = json.loads(sys.argv[1])
    module, name = spec["job"].split(":")
    if spec["session"] is None:
        result = getattr(importlib.import_module(module), name)(**spec["arguments"])
    else:
        from stagetap.engine.session import CaptureSession

        with CaptureSession(**spec["session"]) as session:
            result = getattr(importlib.import_module(module), name)(session, **spec["arguments"])
    Path(spec["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
