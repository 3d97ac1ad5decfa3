"""Whether a package is what its wheel installed: its Python files against the wheel's RECORD."""

from __future__ import annotations

import base64
import csv
import hashlib

from stagetap.patchstack.gitrun import Contents
from stagetap.patchstack.locate import Package


def python_sources(package: Package) -> Contents:
    """Every Python file of the package, by patch path."""
    return {
        f"vllm/{file.relative_to(package.path).as_posix()}": file.read_bytes()
        for file in sorted(package.path.rglob("*.py"))
        if file.is_file()
    }


def unlike_release(package: Package, files: Contents) -> list[str]:
    """What is not as the wheel's own RECORD has it, the thing and what is wrong with it.

    A Python file may be changed, missing, or in no RECORD; a RECORD missing or damaged. What pip
    writes itself is no Python file of the package. ``files`` are the package's Python files, None
    for one that is not there.
    """
    recorded: dict[str, str] = {}
    for record in sorted(package.path.parent.glob("vllm*.dist-info/RECORD")):
        try:
            rows = list(csv.reader(record.read_text("utf-8").splitlines()))
            recorded |= {path: digest for path, digest, _size in rows if _is_source(path)}
        except (OSError, ValueError, csv.Error) as error:
            return [f"{record} is damaged ({error})"]
    if not recorded:
        return [f"{package.path.parent}/vllm*.dist-info/RECORD does not list its files"]
    present = {path: data for path, data in files.items() if data is not None}
    return [
        f"{path} {fault}"
        for path in sorted(recorded.keys() | present.keys())
        if (fault := _fault(present.get(path), recorded.get(path)))
    ]


def _is_source(path: str) -> bool:
    return path.startswith("vllm/") and path.endswith(".py")


def _fault(data: bytes | None, digest: str | None) -> str | None:
    if data is None:
        return "is missing"
    if digest is None:
        return "is in no RECORD of its wheel"
    return None if digest == _record_digest(data) else "is not what its wheel installed"


def _record_digest(data: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    return "sha256=" + encoded.decode().rstrip("=")
