"""What an installation may do to the packages of the base."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetap_image.errors import BuildRefused
from stagetap_image.packages import Package, added_packages, constraints, installed_packages

BASE = {
    "torch": Package("2.13.0+cpu", frozenset({Path("/s/torch/__init__.py")})),
    "vllm": Package("0.32.0", frozenset({Path("/s/vllm/__init__.py")})),
}
OURS = {"stagetap": Package("0.1.0", frozenset({Path("/s/stagetap/__init__.py")}))}


def test_additions_are_told_from_the_base() -> None:
    assert added_packages(BASE, {**BASE, **OURS}) == OURS
    assert added_packages(BASE, BASE) == {}


@pytest.mark.parametrize(
    ("after", "named"),
    [
        ({"vllm": BASE["vllm"]}, "removed torch 2"),
        ({**BASE, "torch": Package("2.14.0", frozenset())}, "torch from 2.13.0.cpu to 2.14.0"),
        (
            {**BASE, "other": Package("1", frozenset({Path("/s/torch/__init__.py")}))},
            "other 1 overwrites /s/torch/__init__.py, which belongs to torch",
        ),
    ],
)
def test_whatever_touches_the_base_is_refused(after: dict[str, Package], named: str) -> None:
    with pytest.raises(BuildRefused, match=named):
        added_packages(BASE, after)


def test_the_base_is_its_own_constraint() -> None:
    assert constraints(BASE) == "torch==2.13.0+cpu\nvllm==0.32.0\n"


@pytest.mark.parametrize("metadata", [None, "", "Name: x\n", "Version: 1\n"])
def test_a_package_without_a_name_is_refused(tmp_path: Path, metadata: str | None) -> None:
    info = tmp_path / "x-1.0.dist-info"
    info.mkdir()
    if metadata is not None:
        (info / "METADATA").write_text(metadata)
    with pytest.raises(BuildRefused, match=rf"{tmp_path}: x-1\.0\.dist-info does not say name"):
        installed_packages([str(tmp_path)])


def test_packages_are_found_with_their_files(tmp_path: Path) -> None:
    for folder, version in (("a", "2.0"), ("b", "1.0")):
        info = tmp_path / folder / "Some.Package-2.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: Some.Package\nVersion: {version}\n")
        (info / "RECORD").write_text("some/__init__.py,,\n../bin/some,,\n")
    found = installed_packages([str(tmp_path / "a"), str(tmp_path / "b")])
    files = {tmp_path / "a" / "some" / "__init__.py", tmp_path / "bin" / "some"}
    assert found == {"some-package": Package("2.0", frozenset(files))}
