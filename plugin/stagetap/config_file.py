"""Reading a model's ``config.json``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from stagetap.errors import Refused
from stagetap.wording import shortened

_CURE = "give a config.json as released"
_PATH_CHARACTERS = 200


def config_file(path: str) -> str:
    """The ``config.json`` of a folder, or the file that was named; ``~`` is the user's home.

    It need not be there. Unlike those of :mod:`pathlib`, these functions raise for no name, however
    long it is or whoever's home it names, and leave it as it was written.
    """
    expanded = os.path.expanduser(path)
    return os.path.join(expanded, "config.json") if os.path.isdir(expanded) else expanded


def read_config_file(file: str | Path) -> dict[str, Any]:
    """What a ``config.json`` holds.

    Raises:
        Refused: it cannot be read, or is no JSON object.
    """
    name = shortened(str(file), _PATH_CHARACTERS)
    try:
        document = json.loads(Path(file).read_text("utf-8"))
    except OSError as error:
        raise Refused(f"{name} cannot be read ({error.strerror or error}); {_CURE}") from None
    except RecursionError:
        raise Refused(f"{name} cannot be read (it is nested too deeply); {_CURE}") from None
    except ValueError as error:
        raise Refused(f"{name} cannot be read ({shortened(str(error))}); {_CURE}") from None
    if not isinstance(document, dict):
        raise Refused(f"{name} holds no JSON object; {_CURE}")
    return document
