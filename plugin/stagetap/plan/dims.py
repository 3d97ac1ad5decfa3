"""Reading sizes out of a model's configuration: what is missing or ill-typed is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagetap.errors import Refused


class Dims:
    """Sizes of a (text) model's configuration, by their names in ``config.json``."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json"):
        self._config = config
        self._where = where

    def get(self, name: str, default: Any = None) -> Any:
        """A value as it stands, or ``default`` where it is absent or null."""
        value = self._config.get(name)
        return default if value is None else value

    def size(self, *names: str) -> int:
        """The first of these sizes that is there.

        Raises:
            Refused: none is, or it is no positive integer.
        """
        value = self.optional_size(*names)
        if value is None:
            raise Refused(
                f"{self._where} says no {' or '.join(names)}, so the plan cannot tell shapes; give "
                "the config.json of a decoder in Hugging Face layout"
            )
        return value

    def optional_size(self, *names: str) -> int | None:
        """The same, None where none is there; 0 counts as absent."""
        for name in names:
            value = self._config.get(name)
            if value is None or value == 0:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise Refused(f"{self._where}: {name} is {value!r}, not a size")
            return value
        return None

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch."""
        return bool(self.get(name, default))

    def section(self, name: str) -> Dims | None:
        """An object inside, None where it is absent."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise Refused(f"{self._where}: {name} is {value!r}, not an object")
        return Dims(value, f"{self._where}: {name}")
