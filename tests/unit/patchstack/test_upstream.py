"""Stand-alone patches for pull requests: what they need, their tests, no tags of ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagetap.cli import patch_upstream
from stagetap.errors import Refused
from stagetap.patchstack.gitrun import git, write_files
from stagetap.patchstack.locate import patches_root, pinned_versions
from stagetap.patchstack.patchfile import Patch
from stagetap.patchstack.series import Series, read_series
from stagetap.patchstack.upstream import (
    FOLDER,
    candidates,
    check_sign_off,
    export_candidate,
    message,
    needs,
    read_tests,
    slug,
)
from unit.patchstack.synthetic import PRISTINE, TAGS, Commit, make_series

TEST = {"tests/test_it.py": b"def test_it(): ...\n"}
CALL = ("line_9 = 9\n", "line_9 = 9\nfrom vllm.hooks import HOOKS\n")
COMMITS = (
    Commit("Add hooks", {"vllm/hooks.py": "HOOKS = []\n"}),
    Commit("Change envs", {"vllm/envs.py": ("line_1 = 1\n", "line_1 = 2\n")}),
    Commit("Call hooks", {"vllm/sequence.py": CALL}),
    Commit(
        "Ours alone",
        {"vllm/envs.py": ("line_5 = 5\n", "line_5 = 6\n")},
        TAGS.replace("Forwarded: no", "Forwarded: not-needed"),
    ),
    Commit(
        "Offered",
        {"vllm/envs.py": ("line_9 = 9\n", "line_9 = 8\n")},
        TAGS.replace("Forwarded: no", "Forwarded: https://example.org/pull/1"),
    ),
)


@pytest.fixture(scope="module")
def offered(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return make_series(tmp_path_factory.mktemp("offered") / "r", COMMITS)


def _tests(series: Series) -> dict[str, dict[str, bytes]]:
    return {
        patch.name: {f"tests/test_{slug(patch).replace('-', '_')}.py": b"x = 1\n"}
        for patch in series.patches
    }


def test_candidates_are_what_nobody_has_offered(offered: Series) -> None:
    assert [slug(patch) for patch in candidates(offered)] == [
        "add-hooks",
        "change-envs",
        "call-hooks",
    ]


def test_two_patches_of_one_subject_are_refused(offered: Series) -> None:
    first = offered.patches[0]
    twice = Series((first, Patch("0006-add-hooks.patch", first.data)), offered.lock)
    with pytest.raises(Refused, match=r"0001-add-hooks.* and 0006-add-hooks.* one subject"):
        candidates(twice)


def test_a_patch_needs_those_whose_modules_it_imports(offered: Series) -> None:
    hooks, envs, call = offered.patches[:3]
    assert needs(call, offered) == [hooks]
    assert needs(envs, offered) == needs(hooks, offered) == []


def test_a_candidate_is_for_git_am_alone(tmp_path: Path, offered: Series) -> None:
    made = export_candidate(
        offered.patches[2], offered, PRISTINE, _tests(offered), "A Name <a@example.org>"
    )
    assert made.name == "call-hooks.patch"
    assert made.patches == ("0001-add-hooks.patch", "0003-call-hooks.patch")
    assert made.tests == ("tests/test_add_hooks.py", "tests/test_call_hooks.py")
    assert made.data.count(b"\nSigned-off-by: A Name <a@example.org>\n") == 2
    assert made.data.count(b"\nFrom: A Name <a@example.org>\n") == 2
    for tag in (b"Forwarded", b"Applied-Upstream", b"Last-Update", b"Origin"):
        assert tag not in made.data
    write_files(tmp_path, PRISTINE)
    git("init", "--quiet", cwd=tmp_path)
    for key, value in {"user.name": "x", "user.email": "x@example.org"}.items():
        git("config", key, value, cwd=tmp_path)
    git("add", "--all", cwd=tmp_path)
    git("commit", "--quiet", "-m", "vLLM", cwd=tmp_path)
    git("am", "--quiet", cwd=tmp_path, stdin=made.data)
    assert (tmp_path / "vllm/hooks.py").is_file()
    assert (tmp_path / "tests/test_call_hooks.py").is_file()
    assert (tmp_path / "vllm/envs.py").read_bytes() == PRISTINE["vllm/envs.py"]


def test_exports_are_deterministic(offered: Series) -> None:
    made = [
        export_candidate(offered.patches[1], offered, PRISTINE, _tests(offered)) for _ in range(2)
    ]
    assert made[0] == made[1]
    assert b"Signed-off-by" not in made[0].data


def test_the_message_is_reason_and_description(offered: Series) -> None:
    assert message(offered.patches[0], None) == (
        "Add hooks\n\nThe reason.\n\nhands over to the plugin\n"
    )


def test_a_test_that_does_not_compile_is_refused(offered: Series) -> None:
    tests = _tests(offered) | {"0002-change-envs.patch": {"tests/test_x.py": b"def ("}}
    with pytest.raises(Refused, match=r"tests/test_x\.py does not compile"):
        export_candidate(offered.patches[1], offered, PRISTINE, tests)


@pytest.mark.parametrize("said", ["", "Name", "<a@b.org>", "Name <a>", "A <a@b>\nB <b@c>"])
def test_a_signature_is_a_name_and_an_address(said: str) -> None:
    with pytest.raises(Refused, match="--sign-off"):
        check_sign_off(said)


class TestFolder:
    def test_a_candidate_without_a_test_is_refused(self, tmp_path: Path, offered: Series) -> None:
        with pytest.raises(Refused, match=r"0001-add-hooks\.patch has no test"):
            read_tests(tmp_path, offered.patches[0])

    def test_files_stay_below_tests(self, tmp_path: Path, offered: Series) -> None:
        write_files(tmp_path / FOLDER / "add-hooks", {"vllm/x.py": b""})
        with pytest.raises(Refused, match="is not below tests/"):
            read_tests(tmp_path, offered.patches[0])

    def test_tests_are_read_by_their_path_in_vllm(self, tmp_path: Path, offered: Series) -> None:
        write_files(tmp_path / FOLDER / "add-hooks", TEST)
        assert read_tests(tmp_path, offered.patches[0]) == TEST


def _shipped() -> list[Patch]:
    root = patches_root()
    return [p for v in pinned_versions(root) for p in read_series(root / "vllm" / v).patches]


@pytest.mark.parametrize("patch", _shipped(), ids=lambda patch: patch.name[:4])
def test_every_shipped_patch_has_a_test_for_upstream(patch: Patch) -> None:
    assert read_tests(patches_root(), patch)


def test_no_test_is_left_of_a_patch_that_is_gone() -> None:
    folders = {path.name for path in (patches_root() / FOLDER).iterdir()}
    assert folders == {slug(patch) for patch in _shipped()}


class TestCommand:
    @pytest.fixture
    def root(self, tmp_path: Path, offered: Series, monkeypatch: pytest.MonkeyPatch) -> Path:
        from stagetap.patchstack.series import write_series

        write_series(offered, tmp_path / "patches/vllm/0.32.0")
        for patch, tests in _tests(offered).items():
            write_files(tmp_path / "patches" / FOLDER / patch[5:].removesuffix(".patch"), tests)
        monkeypatch.setattr(patch_upstream, "patches_root", lambda: tmp_path / "patches")
        monkeypatch.setattr(patch_upstream, "released_files", lambda *_: PRISTINE)
        monkeypatch.setattr(patch_upstream, "fetch_missing", lambda *_: None)
        return tmp_path

    def test_one_file_a_candidate(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out = root / "out"
        patch_upstream.export_upstream(out, None, None, root, as_json=True)
        document = json.loads(capsys.readouterr().out)
        names = [one["file"] for one in document["candidates"]]
        assert names == ["add-hooks.patch", "change-envs.patch", "call-hooks.patch"]
        assert sorted(names) == sorted(path.name for path in out.iterdir())
        assert document["signed_off"] is False
        with pytest.raises(Refused, match="is not empty"):
            patch_upstream.export_upstream(out, None, None, root, as_json=True)

    def test_nothing_is_written_when_one_is_refused(self, root: Path) -> None:
        write_files(root / "patches" / FOLDER / "call-hooks", {"tests/bad.py": b"def ("})
        with pytest.raises(Refused, match="does not compile"):
            patch_upstream.export_upstream(root / "out", None, None, root, as_json=True)
        assert not (root / "out").exists()

    def test_what_is_no_pin_is_refused(self, root: Path) -> None:
        with pytest.raises(Refused, match=r"there are 0\.32\.0"):
            patch_upstream.export_upstream(root / "out", "0.1.0", None, root, as_json=True)
