"""Values of a model's configuration, each of the type that it must have.

Nothing of a ``config.json`` is used but through here, so that whatever stands in it is either a
value of the right type or a :class:`~stagetap.errors.Refused` naming file, key and cure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stagetap.errors import Refused
from stagetap.wording import shown

MAX_SIZE = 2**31 - 1
"""No size of a model is larger: vLLM counts in 32 bits where it counts tokens and rows."""

MAX_LAYERS = 1000
"""The deepest released models have not two hundred; beyond this a number is taken for a mistake."""

CURE = "give the config.json that the model was released with"


class MissingSize(Refused):
    """A size is absent; whoever knows whose it is says what to do about it."""

    def __str__(self) -> str:
        return f"{super().__str__()}; {CURE}"

    @property
    def missing(self) -> str:
        """What is absent, without a cure."""
        return super().__str__()


class ConfigValues:
    """An object of a ``config.json``; an absent value and null are the same.

    Args:
        config: the object.
        where: what to call it in a message.

    Raises:
        Refused: it is no object.
    """

    def __init__(self, config: Any, where: str = "config.json"):
        if not isinstance(config, Mapping):
            raise Refused(f"{where} is {shown(config)}, not an object; {CURE}")
        self._config = config
        self.where = where

    @property
    def names(self) -> tuple[str, ...]:
        """All keys, those whose value is null included."""
        return tuple(self._config)

    def completed_by(self, defaults: Mapping[str, Any]) -> ConfigValues:
        """The same with further values, which replace none."""
        return ConfigValues({**defaults, **self._config}, self.where)

    def says(self, name: str) -> bool:
        """Whether a value is there."""
        return self._config.get(name) is not None

    def shapes(self) -> Iterator[str]:
        """Keys whose value could be a count of parts, or tell parts apart."""
        for name, value in self._config.items():
            if (_is_integer(value) and value > 1) or (isinstance(value, (list, Mapping)) and value):
                yield name

    def has(self, name: str) -> bool:
        """Whether something is there that is neither null, false, zero nor empty."""
        return bool(self._config.get(name))

    def size(self, *names: str, most: int = MAX_SIZE, listed: bool = False) -> int:
        """The first of these sizes that is there; ``listed``: a list may repeat it for every layer.

        Raises:
            MissingSize: none is.
            Refused: it is no positive integer up to ``most``.
        """
        for name in names:
            if self._config.get(name) is not None:
                return self._positive(name, most, listed)
        raise MissingSize(f"{self.where} says no {' or '.join(names)}")

    def optional_size(self, *names: str, most: int = MAX_SIZE) -> int | None:
        """The same, None where none is there."""
        for name in names:
            if self._config.get(name) is not None:
                return self._positive(name, most)
        return None

    def size_or_none(self, *names: str) -> int | None:
        """The same for what a model may have none of: 0 counts as absent. It may be listed."""
        there = [each for each in names if self.says(each) and not self._is_zero(each)]
        return self.size(*there, listed=True) if there else None

    def size_or(self, name: str, default: int) -> int:
        """A size, or ``default`` where it is absent; 0 is none."""
        return default if self._config.get(name) is None else self._positive(name, MAX_SIZE)

    def integer(self, name: str, default: int | None = None) -> int | None:
        """An integer of any sign, or ``default`` where it is absent."""
        value = self._config.get(name)
        if value is None:
            return default
        if not _is_integer(value) or abs(value) > MAX_SIZE:
            raise self.wrong(name, "an integer")
        return int(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A switch."""
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A word."""
        value = self._config.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of words."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self.wrong(name, "a list of texts")
        return tuple(value)

    def integers(self, name: str, least: int = 0) -> tuple[int, ...] | None:
        """A list of integers, none of them below ``least``."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(
            _is_integer(each) and least <= each <= MAX_SIZE for each in value
        ):
            raise self.wrong(name, f"a list of integers from {least}")
        return tuple(value)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in it."""
        return not self._config

    def is_list(self, name: str) -> bool:
        """Whether a list stands there, for keys that hold a list or a number."""
        return isinstance(self._config.get(name), list)

    def section(self, name: str) -> ConfigValues | None:
        """An object inside."""
        value = self._config.get(name)
        return None if value is None else ConfigValues(value, f"{self.where}: {name}")

    def sections(self, name: str) -> dict[str, ConfigValues]:
        """An object of objects inside, by name; empty where it is absent."""
        outer = self.section(name)
        if outer is None:
            return {}
        found = {key: outer.section(key) for key in outer._config}
        return {key: value for key, value in found.items() if value is not None}

    def holds_objects(self) -> bool:
        """Whether any of its values is an object."""
        return any(isinstance(value, Mapping) for value in self._config.values())

    def wrong(self, name: str, expected: str) -> Refused:
        """What to raise for a value that is not as it must be."""
        return Refused(
            f"{self.where}: {name} is {shown(self._config.get(name))}, not {expected}; {CURE}"
        )

    def _positive(self, name: str, most: int, listed: bool = False) -> int:
        value = self._alike(name) if listed else self._config[name]
        if not _is_integer(value) or value < 1:
            raise self.wrong(name, "a size")
        if value > most:
            raise self.wrong(name, f"a size up to {most}")
        return int(value)

    def _alike(self, name: str) -> Any:
        """A value, or the one that a list repeats for every layer."""
        value = self._config[name]
        if not isinstance(value, list) or not value:
            return value
        if any(each != value[0] for each in value):
            raise Refused(
                f"{self.where}: {name} is {shown(value)}: lists that differ by layer are not "
                "counted; count with the largest and the smallest in its place"
            )
        return value[0]

    def _is_zero(self, name: str) -> bool:
        value = self._config.get(name)
        listed = value if isinstance(value, list) else [value]
        return bool(listed) and all(_is_integer(each) and each == 0 for each in listed)


def decoder_values(config: Mapping[str, Any], where: str = "config.json") -> ConfigValues:
    """The values of the decoder: those of ``text_config``, where a multimodal model has one.

    Raises:
        Refused: that is no object.
    """
    outer = ConfigValues(config, where)
    text = outer.section("text_config")
    return text if text is not None and outer.has("text_config") else outer


def positions_are_scaled(values: ConfigValues) -> bool:
    """Whether the longest sequence is more than ``max_position_embeddings``: vLLM derives it."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = values.section(key)
        if scaling is None:
            continue
        if (scaling.text("rope_type") or scaling.text("type") or "default") != "default":
            return True
        if scaling.holds_objects():
            return True  # One set of parameters a kind of attention.
    return False


def said_dtype(values: ConfigValues, outer: ConfigValues) -> str | None:
    """The dtype of a decoder's weights; ``outer`` is what its ``text_config`` stands in."""
    return next(
        (
            name
            for key in ("dtype", "torch_dtype")
            for source in (values, outer)
            if (name := source.text(key)) is not None
        ),
        None,
    )


VLLM_DTYPES = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "float": "float32",
}
"""What vLLM's ``--dtype`` may name -> the dtype that it means."""


def asked_dtype(asked: Any) -> str | None:
    """The dtype that vLLM's ``--dtype`` names; None where ``auto`` leaves it to the checkpoint.

    Raises:
        Refused: it names none of vLLM's.
    """
    if asked in (None, "auto"):
        return None
    if not isinstance(asked, str) or asked not in VLLM_DTYPES:
        raise Refused(
            f"dtype {shown(asked)} is none that vLLM knows; use auto or one of "
            f"{', '.join(VLLM_DTYPES)}"
        )
    return VLLM_DTYPES[asked]


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
