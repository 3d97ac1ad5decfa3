"""The package index that pip is told to use on this machine, for a pip inside a container."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

INDEX_OPTIONS = ("index-url", "extra-index-url", "find-links", "trusted-host", "constraint")


@dataclass(frozen=True)
class PipSettings:
    """pip's own configuration, as far as it says where packages come from.

    Attributes:
        environment: variables that say the same to another pip.
        folders: what these name on this machine: a container needs it at the same place.
        certificates: the bundle that pip trusts, None where that is its own.
    """

    environment: Mapping[str, str]
    folders: tuple[Path, ...]
    certificates: Path | None


def pip_settings() -> PipSettings:
    """As ``pip config list`` has it, files and environment."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return read_settings(listed)


def read_settings(listed: str) -> PipSettings:
    """What the output of ``pip config list`` means; the environment has the last word."""
    options: dict[str, str] = {}
    lines = [line for line in listed.splitlines() if "=" in line]
    for line in sorted(lines, key=lambda each: each.startswith(":env:")):
        name, _, value = line.partition("=")
        options[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    wanted = {name: options[name] for name in INDEX_OPTIONS if name in options}
    # The pages of an index on disk link to files beside it.
    folders = [
        path.parent if name.endswith("index-url") else path
        for name, value in wanted.items()
        for word in value.split()
        if (path := _local(word)) is not None
    ]
    certificates = options.get("cert")
    return PipSettings(
        environment={f"PIP_{name.upper().replace('-', '_')}": v for name, v in wanted.items()},
        folders=tuple(dict.fromkeys(folders)),
        certificates=Path(certificates) if certificates else None,
    )


def _local(word: str) -> Path | None:
    path = Path(unquote(urlsplit(word).path)) if word.startswith("file://") else Path(word)
    return path if path.is_absolute() and path.exists() else None
