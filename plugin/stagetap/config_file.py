"""Reading a model's ``config.json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stagetap.errors import Refused


def read_config_file(file: Path) -> dict[str, Any]:
    """What a ``config.json`` holds.

    Raises:
        Refused: it cannot be read, or is no JSON object.
    """
    try:
        document = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{file} cannot be read ({error}); give a config.json as released") from None
    if not isinstance(document, dict):
        raise Refused(f"{file} holds no JSON object; give a config.json as released")
    return document
