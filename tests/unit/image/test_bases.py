"""bases.lock: what it must say, and how a digest gets into it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stagetap.patchstack.gitrun import git, write_files
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
        ("[cpu]", 'vllm = "0.40.0"\n[cpu]', "vllm is no table: put it below one, such as [cpu]"),
        ("[cpu]", "[[cpu]]", "cpu is no table"),
    ],
)
def test_a_damaged_lock_is_refused(lock: Path, old: str, new: str, named: str) -> None:
    lock.write_text(lock.read_text().replace(old, new, 1))
    with pytest.raises(BuildRefused) as refused:
        read_bases(lock)
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('digest = ""', 'digest=""'),
        ('digest = ""', "digest = ''"),
        ('digest = ""', '  digest  =  "" # not yet'),
        ('digest = ""', '"digest" = ""'),
        ("[cuda]", "[cuda] # GPU"),
        ("[cuda]", "[ cuda ]"),
        ("[cuda]", '["cuda"]'),
        ("[cuda]", "  ['cuda']"),
        ("\n", "\r\n"),
    ],
)
def test_a_digest_is_put_into_one_line_however_it_is_written(
    lock: Path, old: str, new: str
) -> None:
    lock.write_text(lock.read_text().replace(old, new), newline="")
    before = lock.read_bytes().splitlines(keepends=True)
    write_digest(lock, "cuda", DIGEST)
    after = lock.read_bytes().splitlines(keepends=True)
    changed = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert len(changed) == 1
    assert read_bases(lock)["cuda"].digest == DIGEST
    assert changed[0][1].replace(DIGEST.encode(), b"").replace(b'"', b"'") == changed[0][0].replace(
        b'"', b"'"
    )


_REST = "image = 'i'\ntag = 't'\nvllm = '0.32.0'\npython = '3.12'\nmooncake = 'm'\n"


@pytest.mark.parametrize(
    "text",
    [
        "cuda = { digest = '', " + ", ".join(_REST.splitlines()) + " }\n",
        "".join(f"cuda.{line}\n" for line in ["digest = ''", *_REST.splitlines()]),
        '[cuda]\ndigest = """\\\n"""\n' + _REST,
    ],
    ids=["inline table", "dotted keys", "several lines"],
)
def test_a_digest_that_has_no_line_of_its_own_is_refused(lock: Path, text: str) -> None:
    lock.write_text(text)
    assert read_bases(lock)["cuda"].pinned == "unpinned"
    with pytest.raises(BuildRefused, match="line of cuda's digest cannot be told; write it as"):
        write_digest(lock, "cuda", DIGEST)
    assert lock.read_text() == text


def test_a_target_that_the_lock_has_not_is_refused(lock: Path) -> None:
    with pytest.raises(BuildRefused, match="has no rocm; there are cpu, cuda"):
        write_digest(lock, "rocm", DIGEST)


@pytest.mark.parametrize("version", ["0.40.0", "../vllm/0.32.0", ""])
def test_a_vllm_without_a_series_is_refused(version: str) -> None:
    base = replace(read_bases(LOCK)["cpu"], vllm=version)
    with pytest.raises(BuildRefused, match=r"no patch series; there are 0\.32\.0"):
        build_arguments(base)


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


def test_a_new_file_of_the_build_makes_its_revision_dirty(tmp_path: Path) -> None:
    files = {".dockerignore": b"*\n!/plugin\n", ".gitignore": b"*.log\n", "plugin/x.py": b""}
    write_files(tmp_path, files)
    git("init", "--quiet", cwd=tmp_path)
    git("add", "--all", cwd=tmp_path)
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    git(*who, "commit", "--quiet", "-m", "x", cwd=tmp_path)
    commit = git("rev-parse", "HEAD", cwd=tmp_path).decode().strip()
    write_files(tmp_path, {"notes.txt": b"not built in", "plugin/a.log": b"ignored"})
    assert revision(tmp_path) == commit
    write_files(tmp_path, {"plugin/new.py": b""})
    assert revision(tmp_path) == f"{commit}-dirty"
    (tmp_path / "plugin/new.py").unlink()
    write_files(tmp_path, {"plugin/x.py": b"x = 1\n"})
    assert revision(tmp_path) == f"{commit}-dirty"


def test_sources_outside_of_git_have_no_revision(tmp_path: Path) -> None:
    assert revision(tmp_path) == "unknown"
