"""``docker/bases.lock``: what each image is built on, and what its build expects to find there."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from stagetap_image.errors import BuildRefused

UNPINNED = "unpinned"

_HEADER = re.compile(r"""\s*\[\s*["']?([^"'\]\s]+)["']?\s*\]""")
_DIGEST_LINE = re.compile(r"""^(\s*["']?digest["']?\s*=\s*)(?:"[^"]*"|'[^']*')""")
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
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise BuildRefused(f"{file} cannot be read: {error}") from None
    return _bases(text, file)


def write_digest(file: Path, target: str, digest: str) -> None:
    """Put the digest of one target into the lock, in one line; every other byte stays.

    Raises BuildRefused, with nothing written, when ``digest`` is none, the lock has no such
    target, or it is written in a way in which that line cannot be told.
    """
    bases = read_bases(file)
    if target not in bases:
        raise BuildRefused(f"{file.name} has no {target}; there are {', '.join(bases)}")
    bases[target] = _base(vars(replace(bases[target], digest=digest)), target)
    with file.open(encoding="utf-8", newline="") as opened:  # line ends stay as they are
        lines = opened.readlines()
    table = ""
    for number, line in enumerate(lines):
        if header := _HEADER.match(line):
            table = header[1]
        elif table == target:
            lines[number] = _DIGEST_LINE.sub(rf'\g<1>"{digest}"', line)
    text = "".join(lines)
    try:
        said = _bases(text, file)
    except BuildRefused:
        said = {}
    if said != bases:
        raise BuildRefused(
            f"{file}: the line of {target}'s digest cannot be told; write it as `digest = "
            f'"{digest}"` below `[{target}]`, each in a line of its own'
        )
    file.write_text(text, "utf-8", newline="")


def _bases(text: str, file: Path) -> dict[str, Base]:
    try:
        tables = tomllib.loads(text)
    except ValueError as error:
        raise BuildRefused(f"{file} cannot be read: {error}") from None
    return {target: _base(table, f"{file.name}: {target}") for target, table in tables.items()}


def _base(table: object, where: str) -> Base:
    names = [field.name for field in fields(Base)]
    if not isinstance(table, Mapping):
        raise BuildRefused(f"{where} is no table: put it below one, such as [cpu]")
    for name in names:
        if not isinstance(table.get(name), str):
            raise BuildRefused(f"{where} needs {name}, a string")
    if unknown := table.keys() - set(names):
        raise BuildRefused(f"{where}: unknown key {min(unknown)}; known are {', '.join(names)}")
    base = Base(**{name: str(table[name]) for name in names})
    if not _DIGEST.fullmatch(base.digest):
        raise BuildRefused(f"{where}: digest is {base.digest!r}, not sha256:... or empty")
    return base
