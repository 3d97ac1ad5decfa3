"""``docker/bases.lock``: what each image is built on, and what its build expects to find there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from stagetap_image.errors import BuildRefused

UNPINNED = "unpinned"

_DIGEST = re.compile(r"(?:sha256:[0-9a-f]{64})?")


@dataclass(frozen=True)
class Base:
    """One table of the lock.

    Attributes:
        image, tag: what to pull.
        digest: ``sha256:...`` of what the tag stood for when it was pinned; empty until then.
        vllm: version of its vLLM, which must have a patch series.
        python: the Python that vLLM runs on, such as 3.12.
        mooncake: name of the Mooncake package for its CUDA.
    """

    image: str
    tag: str
    digest: str
    vllm: str
    python: str
    mooncake: str

    @property
    def name(self) -> str:
        """``image:tag``."""
        return f"{self.image}:{self.tag}"

    @property
    def pinned(self) -> str:
        """The digest, or ``unpinned``."""
        return self.digest or UNPINNED


def read_bases(file: Path) -> dict[str, Base]:
    """The bases by the name of their target.

    Raises BuildRefused, naming the field, when the file is no such lock.
    """
    try:
        tables = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BuildRefused(f"{file} cannot be read: {error}") from None
    return {target: _base(table, f"{file.name}: {target}") for target, table in tables.items()}


def write_digest(file: Path, target: str, digest: str) -> None:
    """Put the digest of one target into the lock; every other byte stays.

    Raises BuildRefused when ``digest`` is none, or the lock has no such target.
    """
    base = read_bases(file)[target]
    replaced = _base(vars(replace(base, digest=digest)), target)
    text = file.read_text("utf-8")
    table = re.search(rf"^\[{target}\]\n(?:(?!\[).*\n)*", text, re.MULTILINE)
    assert table is not None  # read_bases has read it
    line = re.sub(r'^digest = ".*"$', f'digest = "{replaced.digest}"', table[0], flags=re.MULTILINE)
    file.write_text(text[: table.start()] + line + text[table.end() :], "utf-8")


def _base(table: Mapping[str, object], where: str) -> Base:
    names = [field.name for field in fields(Base)]
    for name in names:
        if not isinstance(table.get(name), str):
            raise BuildRefused(f"{where} needs {name}, a string")
    if unknown := table.keys() - set(names):
        raise BuildRefused(f"{where}: unknown key {min(unknown)}; known are {', '.join(names)}")
    base = Base(**{name: str(table[name]) for name in names})
    if not _DIGEST.fullmatch(base.digest):
        raise BuildRefused(f"{where}: digest is {base.digest!r}, not sha256:... or empty")
    return base
