"""Reading a YAML file in which each thing stands once: a map of texts, without aliases."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from stagetap.errors import Refused
from stagetap.wording import one_line, shortened, shown

_MOST_BYTES = 2**17
_DEEPEST = 32


def read_yaml_map(file: Path) -> dict[str, Any]:
    """What a file holds.

    Raises:
        Refused: it is no YAML, too long or nested too deeply; it holds no map, an alias,
            a key that is no text, or one twice, ``-`` and ``_`` being alike.
    """
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise Refused(f"it has more than {_MOST_BYTES} bytes")
        document = yaml.load(text.decode("utf-8"), _Loader)
    except (Refused, OSError, ValueError, OverflowError, yaml.YAMLError) as error:
        said = shortened(one_line(error), 300)
        name = shortened(str(file), 200)
        raise Refused(f"{name} cannot be read ({said}); give a file in YAML") from None
    if not isinstance(document, dict):
        held = "nothing" if document is None else shown(document)
        raise Refused(f"{file} holds {held}; give a file of keys and values in YAML")
    return document


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise Refused(f"{_line(event)}: *{event.anchor} is an alias: write out what it names")
        if self._depth == _DEEPEST:
            raise Refused(f"{_line(self.peek_event())}: more than {_DEEPEST} levels: nest less")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Hashable, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise Refused(f"{_line(node)}: no map, where one must be")
        found: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise Refused(f"{_line(key)}: {shown(key.value)} is a key and no text: quote it")
            if (name := key.value.replace("_", "-")) in found:
                raise Refused(f"{_line(key)}: {shown(name)} stands twice: keep one of both")
            found.add(name)
        return super().construct_mapping(node, deep)


def _line(place: yaml.Event | yaml.Node) -> str:
    return f"line {place.start_mark.line + 1}"
