"""bases.lock: what it must say, and how a digest gets into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stagetap.patchstack.locate import patches_root, pinned_versions
from stagetap_image.__main__ import LOCK
from stagetap_image.bases import read_bases, write_digest
from stagetap_image.build import build_arguments, revision
from stagetap_image.errors import BuildRefused
from stagetap_image.mooncake import distribution_for

DIGEST = f"sha256:{'0f' * 32}"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "bases.lock"
    file.write_bytes(LOCK.read_bytes())
    return file


def test_the_lock_of_this_tree() -> None:
    bases = read_bases(LOCK)
    assert set(bases) == {"cpu", "cuda"}
    for base in bases.values():
        assert base.vllm in pinned_versions(patches_root())
        assert base.tag == f"v{base.vllm}"
    assert bases["cpu"].mooncake == distribution_for(None)
    assert bases["cuda"].mooncake == distribution_for(13)


def test_a_digest_is_all_that_changes(lock: Path) -> None:
    before = lock.read_text().splitlines()
    write_digest(lock, "cuda", DIGEST)
    after = lock.read_text().splitlines()
    assert [line for line in after if line not in before] == [f'digest = "{DIGEST}"']
    assert len(after) == len(before)
    bases = read_bases(lock)
    assert (bases["cpu"].pinned, bases["cuda"].pinned) == ("unpinned", DIGEST)
    write_digest(lock, "cuda", "")
    assert lock.read_bytes() == LOCK.read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('digest = ""', 'digest = "sha256:12"', "cpu: digest is 'sha256:12'"),
        ('python = "3.12"', "python = 3.12", "cpu needs python, a string"),
        ('vllm = "0.32.0"\n', "", "cpu needs vllm, a string"),
        ("tag =", "tags =", "cpu needs tag"),
        ("[cpu]\n", "[cpu]\ncuda = '13'\n", "cpu: unknown key cuda"),
        ("[cpu]", "[cpu", "cannot be read"),
    ],
)
def test_a_damaged_lock_is_refused(lock: Path, old: str, new: str, named: str) -> None:
    lock.write_text(lock.read_text().replace(old, new, 1))
    with pytest.raises(BuildRefused) as refused:
        read_bases(lock)
    assert named in str(refused.value)


def test_no_digest_is_written_that_is_none(lock: Path) -> None:
    with pytest.raises(BuildRefused, match="digest is 'latest'"):
        write_digest(lock, "cpu", "latest")
    assert lock.read_bytes() == LOCK.read_bytes()


def test_the_dockerfile_knows_every_argument() -> None:
    declared = {
        line.split()[1].partition("=")[0]
        for line in LOCK.with_name("Dockerfile").read_text().splitlines()
        if line.startswith("ARG ")
    }
    arguments = build_arguments(read_bases(LOCK)["cpu"])
    assert set(arguments) <= declared
    assert declared - set(arguments) == {"LIBRARIES", "USER", "DOCTOR"}
    assert len(arguments["SERIES"]) == 64


def test_sources_outside_of_git_have_no_revision(tmp_path: Path) -> None:
    assert revision(tmp_path) == "unknown"
