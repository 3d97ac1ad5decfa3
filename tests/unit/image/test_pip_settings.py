"""pip's own configuration, as the tests of the image hand it on."""

from __future__ import annotations

from pathlib import Path

from image.pip_settings import read_settings


def test_indexes_on_disk_are_named_with_their_folders(tmp_path: Path) -> None:
    index, wheels, other = (tmp_path / name for name in ("pypi/simple", "wheels", "other"))
    for folder in (index, wheels):
        folder.mkdir(parents=True)
    listed = f"""
:env:.find-links='{wheels}'
global.cert='/bundle.crt'
global.extra-index-url='file://{index} https://example.org/simple'
global.find-links='{other}'
global.timeout='60'
"""
    settings = read_settings(listed)
    assert settings.environment == {
        "PIP_EXTRA_INDEX_URL": f"file://{index} https://example.org/simple",
        "PIP_FIND_LINKS": str(wheels),
    }
    assert settings.folders == (index.parent, wheels)
    assert settings.certificates == Path("/bundle.crt")


def test_a_pip_that_was_told_nothing() -> None:
    settings = read_settings("")
    assert (settings.environment, settings.folders, settings.certificates) == ({}, (), None)
