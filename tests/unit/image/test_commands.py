"""``just pin-base`` and ``just image``, with a stand-in for the Docker API."""

from __future__ import annotations

import itertools
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound

from stagetap_image import __main__ as commands
from stagetap_image.__main__ import LOCK
from stagetap_image.bases import read_bases
from stagetap_image.build import Built, build_arguments, build_image, connect
from stagetap_image.errors import BuildRefused

DIGEST = f"sha256:{'ab' * 32}"


class Registry:
    """Images of a client whose registry knows some tags."""

    def __init__(self, known: dict[str, str]):
        self._known = known

    def get_registry_data(self, name: str) -> Any:
        if name not in self._known:
            raise APIError("500 Server Error", explanation=f"no route to the registry of {name}")
        return SimpleNamespace(id=self._known[name])


class Daemon:
    """A client whose build says these steps and, unless they fail, leaves an image."""

    def __init__(self, *steps: dict[str, str]):
        self.steps = steps
        self.asked: dict[str, Any] = {}
        self.api = SimpleNamespace(build=self._build)
        self.images = SimpleNamespace(get=self._get)

    def _build(self, **asked: Any) -> tuple[dict[str, str], ...]:
        self.asked = asked
        return self.steps

    def _get(self, name: str) -> Any:
        sizes = {"stagetap:cpu": 1500, "vllm/vllm-openai-cpu:v0.32.0": 1000}
        if name not in sizes:
            raise ImageNotFound(name)
        return SimpleNamespace(id="sha256:1", attrs={"Size": sizes[name]})


def build(daemon: Any, lines: list[str]) -> Built:
    base = read_bases(LOCK)["cpu"]
    return build_image(daemon, "cpu", base, tag="stagetap:cpu", log=lines.append)


def test_a_base_that_no_registry_gives() -> None:
    class Offline(Daemon):
        def _get(self, name: str) -> Any:
            raise ImageNotFound(name)

    with pytest.raises(
        BuildRefused,
        match=r"vllm-openai-cpu:v0\.32\.0 is not on this machine .*"
        r"no such host; docker load it",
    ):
        build(Offline({"error": "lookup registry: no such host"}), [])
    with pytest.raises(BuildRefused, match=r"^no space left$"):
        build(Daemon({"error": "no space left"}), [])


def test_the_docker_build_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    commands.build_command("cpu", tag="mine:1", network="host", only_print=True)
    words = shlex.split(capsys.readouterr().out)
    assert words[:2] == ["docker", "build"]
    assert words[-1] == "."
    assert {"mine:1", "host", "cpu"} < set(words)
    told = [word for before, word in itertools.pairwise(words) if before == "--build-arg"]
    base = read_bases(LOCK)["cpu"]
    assert dict(word.split("=", 1) for word in told) == build_arguments(base)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    file = tmp_path / "bases.lock"
    file.write_bytes(LOCK.read_bytes())
    return file


def pin(monkeypatch: pytest.MonkeyPatch, lock: Path, known: dict[str, str]) -> int:
    monkeypatch.setattr(commands, "connect", lambda: SimpleNamespace(images=Registry(known)))
    monkeypatch.setattr("sys.argv", ["image", "pin", "--lock", str(lock)])
    with pytest.raises(SystemExit) as ended:
        commands.main()
    return int(ended.value.code or 0)


def test_every_base_is_pinned(monkeypatch: pytest.MonkeyPatch, lock: Path) -> None:
    known = {base.name: DIGEST for base in read_bases(lock).values()}
    assert pin(monkeypatch, lock, known) == 0
    assert {base.digest for base in read_bases(lock).values()} == {DIGEST}


def test_a_registry_that_does_not_answer_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {read_bases(lock)["cuda"].name: DIGEST}
    assert pin(monkeypatch, lock, known) == 1
    assert read_bases(lock)["cuda"].digest == DIGEST
    assert read_bases(lock)["cpu"].pinned == "unpinned"
    said = capsys.readouterr().err
    assert (
        "no route to the registry of vllm/vllm-openai-cpu:v0.32.0; it stays unpinned"
        in " ".join(said.split())
    )


def test_a_build_is_told_what_the_lock_says() -> None:
    daemon, lines = Daemon({"stream": "Step 1\n"}, {"stream": "\x1b[91mwarn\x1b[0m\n"}), []
    built = build(daemon, lines)
    assert lines == ["Step 1", "warn"]
    assert (built.base_bytes, built.added_bytes) == (1000, 500)
    assert built.report()["digest"] == "unpinned"
    assert daemon.asked["target"] == "cpu"
    assert daemon.asked["buildargs"] == build_arguments(read_bases(LOCK)["cpu"])


def test_a_build_that_fails_says_why_in_its_own_words() -> None:
    steps = [{"stream": "\x1b[91mimage: refused: vllm/x.py is unknown\n"}, {"error": "exit code 1"}]
    with pytest.raises(BuildRefused, match=r"^vllm/x\.py is unknown$"):
        build(Daemon(*steps), [])
    with pytest.raises(BuildRefused, match=r"^no space left$"):
        build(Daemon({"error": "no space left\n"}), [])


def test_no_daemon_is_said(tmp_path: Path) -> None:
    with pytest.raises(BuildRefused, match=r"no Docker daemon answers.*DOCKER_HOST"):
        connect(f"unix://{tmp_path}/none.sock")


def refused_line(capsys: pytest.CaptureFixture[str]) -> str:
    """All that a command that was refused has said."""
    with pytest.raises(SystemExit) as ended:
        commands.main()
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("image: refused: ")
    return line


@pytest.mark.parametrize(
    ("arguments", "named"), [(["build", "rocm"], "has no rocm; there are cpu, cuda")]
)
def test_what_is_refused_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["image", *arguments])
    assert named in refused_line(capsys)


@pytest.mark.parametrize(
    ("command", "old", "new", "named"),
    [
        (["build"], 'vllm = "0.32.0"', 'vllm = "0.40.0"', "vllm is '0.40.0' for vllm/vllm-openai"),
        (["build"], "[cpu]", 'vllm = "0.40.0"\n[cpu]', "bases.lock: vllm is no table"),
        (["pin"], "[cpu]", 'vllm = "0.40.0"\n[cpu]', "bases.lock: vllm is no table"),
        (["pin"], 'digest = ""', 'digest = """\\\n"""', "the line of cpu's digest cannot be told"),
    ],
)
def test_a_lock_that_cannot_be_meant_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    lock: Path,
    command: list[str],
    old: str,
    new: str,
    named: str,
) -> None:
    daemon = Daemon()
    known = {base.name: DIGEST for base in read_bases(lock).values()}
    daemon.images.get_registry_data = Registry(known).get_registry_data
    lock.write_text(lock.read_text().replace(old, new))
    monkeypatch.setattr(commands, "connect", lambda: daemon)
    monkeypatch.setattr("sys.argv", ["image", *command, "--lock", str(lock)])
    before = lock.read_bytes()
    assert named in refused_line(capsys)
    assert lock.read_bytes() == before
