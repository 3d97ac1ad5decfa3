"""Apply, revert, verify on a package: all or nothing, byte-exact, from every state."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagetap.errors import Refused
from stagetap.patchstack import operations
from stagetap.patchstack.series import Series, SeriesError, sha256
from unit.patchstack.faults import fail_at, killed_at
from unit.patchstack.synthetic import PRISTINE, Snapshot, make_package, make_patches, snapshot


def test_apply_makes_every_file_what_the_lock_says(
    vllm: Path, patches: Path, series: Series
) -> None:
    applied = operations.apply(vllm, patches)
    assert applied.state == "applied"
    assert list(applied.changed) == series.paths
    for path, pin in series.lock.files.items():
        assert sha256((vllm.parent / path).read_bytes()) == pin.after
    assert "hook = 2" in (vllm / "config/model.py").read_text()
    assert operations.verify(vllm, patches).state == "applied"


def test_revert_gives_every_byte_and_mode_back(vllm: Path, patches: Path) -> None:
    before = snapshot(vllm)
    operations.apply(vllm, patches)
    assert (vllm / "config/model.py").stat().st_mode & 0o777 == 0o755
    assert (vllm / "envs.py").stat().st_mode & 0o777 == 0o600
    assert operations.revert(vllm, patches).state == "pristine"
    assert snapshot(vllm) == before


@pytest.mark.parametrize("operation", [operations.apply, operations.revert])
def test_a_second_time_touches_nothing(
    vllm: Path, patches: Path, operation: Callable[[Path, Path], operations.Status]
) -> None:
    operations.apply(vllm, patches)
    operation(vllm, patches)
    before = {path: path.stat().st_mtime_ns for path in vllm.rglob("*")}
    assert operation(vllm, patches).changed == ()
    assert {path: path.stat().st_mtime_ns for path in vllm.rglob("*")} == before


def test_a_stray_file_among_the_records_is_cleared_away(vllm: Path, patches: Path) -> None:
    operations.apply(vllm, patches)
    for stray, command in ((".DS_Store", operations.apply), ("notes", operations.revert)):
        (vllm / ".stagetap" / stray).write_text("stray")
        command(vllm, patches)
        assert not (vllm / ".stagetap" / stray).exists()
    assert not (vllm / ".stagetap").exists()


def test_a_damaged_record_is_named_with_the_cure(vllm: Path, patches: Path) -> None:
    operations.apply(vllm, patches)
    (lock,) = (vllm / ".stagetap").glob("*/lock.json")
    lock.write_bytes(b"\xff")
    with pytest.raises(SeriesError) as refused:
        operations.verify(vllm, patches)
    assert f"{lock.parent} is damaged: lock.json" in str(refused.value)
    assert "reinstall vLLM 0.32.0" in str(refused.value)


def test_a_folder_in_the_place_of_a_file_is_named(vllm: Path, patches: Path) -> None:
    (vllm / "envs.py").unlink()
    (vllm / "envs.py").mkdir()
    for command in (operations.status, operations.apply, operations.revert, operations.verify):
        with pytest.raises(Refused, match=r"vllm/envs\.py cannot be read: Is a dir.*; reinstall"):
            command(vllm, patches)


def test_status_changes_nothing_and_says_each_file(vllm: Path, patches: Path) -> None:
    before = snapshot(vllm)
    found = operations.status(vllm, patches)
    assert found.state == "pristine"
    assert set(found.files.values()) == {"pristine"}
    assert snapshot(vllm) == before
    assert json.loads(json.dumps(found.document()))["vllm_version"] == "0.32.0"


def test_an_empty_series_is_always_applied(tmp_path: Path, vllm: Path) -> None:
    from unit.patchstack.synthetic import empty_series

    patches = make_patches(tmp_path / "none", empty_series())
    before = snapshot(vllm)
    assert operations.verify(vllm, patches).state == "applied"
    operations.apply(vllm, patches)
    operations.revert(vllm, patches)
    assert snapshot(vllm) == before


def test_verify_says_what_to_do(vllm: Path, patches: Path) -> None:
    with pytest.raises(Refused, match=r"pristine, vllm/config/model\.py .*`stagetap patch apply`"):
        operations.verify(vllm, patches)


class TestForeign:
    @pytest.mark.parametrize("operation", [operations.apply, operations.revert, operations.verify])
    def test_the_first_unknown_file_is_named(
        self, vllm: Path, patches: Path, operation: Callable[[Path, Path], object]
    ) -> None:
        for name in ("envs.py", "config/model.py"):
            (vllm / name).write_text("somebody's own\n")
        before = snapshot(vllm)
        with pytest.raises(Refused, match=r"vllm/config/model\.py has contents that no series"):
            operation(vllm, patches)
        assert snapshot(vllm) == before

    def test_a_missing_file_is_named(self, vllm: Path, patches: Path) -> None:
        (vllm / "envs.py").unlink()
        with pytest.raises(Refused, match=r"vllm/envs\.py is missing"):
            operations.apply(vllm, patches)
        assert operations.status(vllm, patches).state == "foreign"

    def test_a_file_in_the_way_of_a_new_one_is_named(self, vllm: Path, patches: Path) -> None:
        (vllm / "stagetap_hooks.py").write_text("in the way\n")
        with pytest.raises(Refused, match=r"vllm/stagetap_hooks\.py has contents"):
            operations.apply(vllm, patches)

    @pytest.mark.parametrize("operation", [operations.status, operations.apply, operations.revert])
    def test_another_version_is_refused_by_version_and_first_file(
        self, tmp_path: Path, patches: Path, operation: Callable[[Path, Path], object]
    ) -> None:
        changed = {
            "vllm/_version.py": b"__version__ = version = '0.33.0'\n",
            "vllm/envs.py": b"# another release\n",
        }
        other = make_package(tmp_path / "other", PRISTINE | changed)
        with pytest.raises(Refused, match=r"vLLM 0\.33\.0 .* vllm/envs\.py has .*vllm==0\.32\.0"):
            operation(other, patches)

    def test_another_version_with_equal_files_is_refused_too(
        self, tmp_path: Path, patches: Path
    ) -> None:
        version = {"vllm/_version.py": b"__version__ = version = '0.32.1'\n"}
        other = make_package(tmp_path / "other", PRISTINE | version)
        with pytest.raises(Refused, match=r"vLLM 0\.32\.1 .*another release"):
            operations.apply(other, patches)

    def test_a_build_of_the_same_release_is_served(self, tmp_path: Path, patches: Path) -> None:
        version = {"vllm/_version.py": b"__version__ = version = '0.32.0+cpu'\n"}
        other = make_package(tmp_path / "other", PRISTINE | version)
        assert operations.apply(other, patches).state == "applied"


class TestUpgrade:
    def test_an_older_series_is_undone_first(
        self, tmp_path: Path, vllm: Path, patches: Path, older_patches: Path
    ) -> None:
        operations.apply(vllm, older_patches)
        assert operations.status(vllm, patches).state == "outdated"
        operations.apply(vllm, patches)
        fresh = make_package(tmp_path / "fresh")
        operations.apply(fresh, patches)
        assert snapshot(vllm) == snapshot(fresh)

    def test_an_older_series_is_reverted(
        self, vllm: Path, patches: Path, older_patches: Path
    ) -> None:
        before = snapshot(vllm)
        operations.apply(vllm, older_patches)
        operations.revert(vllm, patches)
        assert snapshot(vllm) == before

    def test_a_record_that_outlived_a_reinstallation_does_no_harm(
        self, tmp_path: Path, vllm: Path, patches: Path, older_patches: Path
    ) -> None:
        before = snapshot(vllm)
        operations.apply(vllm, older_patches)
        (vllm / "older_hooks.py").unlink()
        make_package(tmp_path / "site-packages")
        assert operations.status(vllm, patches).state == "pristine"
        operations.apply(vllm, patches)
        operations.revert(vllm, patches)
        assert snapshot(vllm) == before


def _transitions() -> list[object]:
    found = []
    for start, operation in itertools.product(
        ("pristine", "older", "applied"), ("apply", "revert")
    ):
        if (start, operation) not in (("pristine", "revert"), ("applied", "apply")):
            found.append(pytest.param(start, operation, id=f"{operation}-from-{start}"))
    return found


@pytest.mark.parametrize(("start", "operation"), _transitions())
class TestFaults:
    """At every access to the package in turn, an error and a kill."""

    @pytest.fixture
    def states(
        self, tmp_path: Path, patches: Path, older_patches: Path, start: str, operation: str
    ) -> tuple[Path, Callable[[], object], Snapshot]:
        """A package in the start state, the operation on it, and how it must look afterwards."""

        def prepared(name: str) -> Path:
            package = make_package(tmp_path / name)
            if start != "pristine":
                operations.apply(package, older_patches if start == "older" else patches)
            return package

        act = operations.apply if operation == "apply" else operations.revert
        done = prepared("done")
        act(done, patches)
        package = prepared("package")
        return package, lambda: act(package, patches), snapshot(done)

    def test_an_error_leaves_all_or_nothing(
        self, states: tuple[Path, Callable[[], object], Snapshot], patches: Path
    ) -> None:
        package, act, done = states
        before = snapshot(package)
        for access in itertools.count(1):
            outcome = fail_at(access, package, act)
            if not outcome.fired:
                break
            if isinstance(outcome.error, Refused | SeriesError | OSError):
                assert snapshot(package) == before, f"access {access}: {outcome.error}"
                continue
            if outcome.error is not None:
                # Only what clears up after the last file may fail with the change made.
                assert "changed as asked" in str(outcome.error), f"access {access}"
                act()
            assert snapshot(package) == done, f"access {access}"
            self._start_again(package, before)
        assert access > 10
        assert outcome.error is None
        assert snapshot(package) == done

    def test_a_kill_is_healed_by_going_on_or_back(
        self, states: tuple[Path, Callable[[], object], Snapshot], patches: Path
    ) -> None:
        package, act, done = states
        before = snapshot(package)
        released = snapshot(make_package(package.parent / "released"))
        for change in itertools.count(1):
            if not killed_at(change, package, act):
                break
            assert operations.status(package, patches).state != "foreign"
            killed = snapshot(package)
            act()
            assert snapshot(package) == done, f"killed before change {change}, gone on"
            self._start_again(package, killed)
            operations.revert(package, patches)
            assert snapshot(package) == released, f"killed before change {change}, gone back"
            self._start_again(package, before)
        assert change > 10
        assert snapshot(package) == done

    @staticmethod
    def _start_again(package: Path, before: Snapshot) -> None:
        for path in sorted(package.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        for name, (mode, data) in before.items():
            path = package / name
            path.mkdir() if data is None else path.write_bytes(data)
            path.chmod(mode)


def test_a_forbidden_directory_is_named_and_nothing_changes(patches: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        vllm = make_package(Path(folder))
        for path in vllm.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        shutil.copytree(patches, Path(folder) / "patches")
        (vllm / "config").chmod(0o555)
        before = snapshot(vllm)
        said = _as_ordinary_user(lambda: operations.apply(vllm, Path(folder) / "patches"))
        assert said.startswith("Refused: cannot patch ")
        assert "nothing was changed" in said
        assert str(vllm) in said
        assert snapshot(vllm) == before


def _as_ordinary_user(act: Callable[[], object]) -> str:
    """What ``act`` raises when root, who may write everywhere, does not run it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            act()
        except Exception as error:  # noqa: BLE001 - handed to the parent
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as pipe:
        return pipe.read()


def test_copies_that_share_the_inode_keep_their_bytes(vllm: Path, patches: Path) -> None:
    cached = vllm.parent / "cached.py"
    os.link(vllm / "envs.py", cached)
    operations.apply(vllm, patches)
    assert cached.read_bytes() == PRISTINE["vllm/envs.py"]


def test_several_at_once_do_not_meet(vllm: Path, patches: Path) -> None:
    before = snapshot(vllm)
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            try:
                for act in (operations.apply, operations.revert) * 3:
                    act(vllm, patches)
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert snapshot(vllm) == before


def test_byte_code_never_outlives_its_source(vllm: Path, patches: Path) -> None:
    """It is matched by size, which the patch keeps here, and by the second of the last change."""
    source = vllm / "envs.py"
    ahead = time.time() + 100
    os.utime(source, (ahead, ahead))
    seconds, sizes = [int(ahead)], [source.stat().st_size]
    for act in (operations.apply, operations.revert, operations.apply):
        act(vllm, patches)
        seconds.append(int(source.stat().st_mtime))
        sizes.append(source.stat().st_size)
    assert len(set(sizes)) == 1
    assert seconds == sorted(set(seconds))
