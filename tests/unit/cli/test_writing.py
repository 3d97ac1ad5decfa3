"""What a command cannot write is one line that names it; nothing is a traceback."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from stagetap.cli.child import run_module
from stagetap.cli.folders import make_folder, write_file
from stagetap.equivalence.arms import Arm, run_arm, write_prompts
from stagetap.errors import Refused, StoreError
from stagetap.patchstack.series import Lock, Series
from stagetap.patchstack.workshop import build_repository
from stagetap.stores.base import check_store_writable
from stagetap.stores.mooncake_processes import Process
from stagetap.training.metrics_file import MetricsFile
from store_samples import Engine
from tmpfs import Tmpfs
from unit.cli.commands import Command


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    engine = Engine(tmp_path / "store")
    engine.committer.commit(engine.publish(engine.ref("s"), 9))
    engine.close()
    return tmp_path / "store"


def run(*arguments: object, stdout: object, shell: Sequence[str] = ()) -> tuple[int, str]:
    """``stagetap`` in a process of its own, whose stdout goes there."""
    done = subprocess.run(
        [*shell, sys.executable, "-m", "stagetap", *map(str, arguments)],
        stdout=stdout,  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
FULL = "stagetap: error: cannot write to stdout (/dev/full): No space left on device [ENOSPC]: "


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_stdout_is_one_line(dataset: Path, tmp_path: Path, options: tuple[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **SIZES}))
    with open("/dev/full", "w") as full:
        for command in (("inspect", dataset), ("plan", config, "--layers", "2")):
            code, said = run(*command, *options, stdout=full)
            assert (code, said.count("\n")) == (1, 1), said
            assert said.startswith(FULL)


def test_a_full_stdout_of_a_command_that_keeps_it_clean(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from stagetap import cli\n"
        "from stagetap.cli.output import print_json, stdout_kept_clean\n"
        "def app(**_):\n"
        "    with stdout_kept_clean() as stdout:\n"
        "        print('for stderr')\n"
        "        print_json({'a': 1}, stdout)\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    first, last = done.stderr.splitlines()
    assert first == "for stderr"
    assert last.startswith(FULL)


def test_a_closed_stdout_is_one_line(dataset: Path) -> None:
    closing = ("sh", "-c", 'exec "$@" >&-', "sh")
    code, said = run("inspect", dataset, stdout=None, shell=closing)
    assert (code, said.count("\n")) == (1, 1), said
    assert said.startswith("stagetap: error: stdout is closed: ")


def test_a_reader_that_has_gone_is_no_news(dataset: Path) -> None:
    gone, stdout = os.pipe()
    os.close(gone)
    try:
        for options in ((), ("--json",)):
            assert run("inspect", dataset, *options, stdout=stdout) == (1, "")
    finally:
        os.close(stdout)


def test_what_a_command_makes_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    series = Series((), Lock("0.0.1", "", {}))
    arm = Arm(model="m", layers=(0,), pp=2)
    for attempt in (
        lambda: make_folder(file / "a"),
        lambda: write_file(file / "a", "text"),
        lambda: Process("a program", ["true"], "127.0.0.1", file / "a"),
        lambda: build_repository(file / "a", {}, series),
        lambda: write_prompts(file / "a", []),
        lambda: run_arm(arm, tmp_path / "prompts", tmp_path / "out", file / "a"),
        lambda: run_module("stagetap", "--version", log=file / "a"),
    ):
        with pytest.raises(StoreError, match=rf"cannot .* {file}/a.*ENOTDIR.* is a file"):
            attempt()


def test_reports_of_a_trainer_that_find_no_room() -> None:
    file = MetricsFile(Path("/dev/full"))
    record = logging.makeLogRecord({"msg": {"loss": 1.0}})
    with pytest.raises(StoreError, match=r"cannot write /dev/full: .*ENOSPC"):
        file.handle(record)


def test_a_store_that_cannot_be_written_is_refused(
    mount_tmpfs: Callable[[int], Tmpfs], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    tmpfs = mount_tmpfs(1)
    (tmpfs.path / "there").mkdir()
    for name in ("there", "new/below"):
        check_store_writable(tmpfs.path / name)
    assert [each.name for each in tmpfs.path.iterdir()] == ["there"]
    tmpfs.make_read_only()
    for where in ("there", "new/below"):
        path = tmpfs.path / where
        with pytest.raises(Refused, match=rf"cannot write to {path}: .*EROFS.*mounted writable"):
            check_store_writable(f"file://{path}")
    with pytest.raises(Refused, match=rf"cannot write to {file}/a: .*ENOTDIR.* is a file"):
        check_store_writable(file / "a")


def test_a_store_of_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    code = (
        "import os\n"
        "import stagetap.stores.file_io\n"
        "from stagetap.stores.base import check_store_writable\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "check_store_writable('/usr/store')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "cannot write to /usr/store: Permission denied [EACCES]: give this user" in done.stderr


def test_commands_refuse_before_an_engine(
    stagetap: Command, checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    prompts = tmp_path / "prompts.jsonl"
    file.touch()
    prompts.write_text('{"prompt_token_ids": [1, 2]}\n')
    model = ("--model", checkpoint, "--layers", "0,6")
    for command, code in (
        (("capture", *model, "--prompts", prompts, "--out", file / "a"), 2),
        (("serve", checkpoint, "--layers", "0,6", "--store", file / "a"), 2),
        (("equivalence", *model, "--lengths", 5, "--keep", file / "a"), 1),
    ):
        done = stagetap(*command)
        assert (done.code, done.stdout) == (code, ""), done.stderr
        assert re.fullmatch(rf"stagetap: \w+: cannot .*{file}/a: .*ENOTDIR.*\n", done.stderr)
    assert file.stat().st_size == 0
