"""One arm of a comparison: a capture by the production command, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stagetap.engine.environment import BINDING_ENV, cores_by_rank, is_cpu_build
from stagetap.errors import Refused, StageTapError
from stagetap.partition import PARTITION_ENV
from stagetap.prompts import TokenPrompt
from stagetap.stores.file_io import naming
from stagetap.stores.mooncake_uri import is_mooncake

RUN_ID = "equivalence"

_REFUSED, _ERROR = "stagetap: refused: ", "stagetap: error: "
_SHOWN_LOG_LINES = 40
_END_SECONDS = 20.0


@dataclass(frozen=True)
class Arm:
    """What one arm captures, and how.

    ``engine_args`` are arguments of vLLM's ``EngineArgs``; ``partition`` the layers per stage;
    ``beside`` the ranks of the arm that this one must agree with, whose share of cores it takes.
    """

    model: str
    layers: Sequence[int]
    pp: int
    tp: int = 1
    partition: Sequence[int] | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    run_id: str = RUN_ID
    beside: int | None = None

    def single_stage(self) -> Arm:
        """The arm that this one must equal: it differs in its stages alone."""
        return replace(self, pp=1, partition=None, beside=self.pp * self.tp)

    def command(self, prompts: Path, out: str | Path) -> list[str]:
        """The ``stagetap capture`` of this arm: one request a call, so that batches are equal."""
        engine_args = [
            part
            for name, value in self.engine_args.items()
            for part in ("--engine-arg", f"{name}={json.dumps(value)}")
        ]
        return [
            *(sys.executable, "-m", "stagetap", "capture"),
            *("--model", self.model, "--prompts", str(prompts), "--out", str(out)),
            *("--layers", ",".join(map(str, self.layers)), "--run", self.run_id),
            *("--pp", str(self.pp), "--tp", str(self.tp)),
            *("--in-flight", "1", "--json"),
            *(() if is_mooncake(str(out)) else ("--keep-free-mib", "0")),
            *engine_args,
        ]

    def environment(self) -> dict[str, str]:
        """This process's environment with the arm's own partition, and no other."""
        environment = {name: value for name, value in os.environ.items() if name != PARTITION_ENV}
        if self.partition is not None:
            environment[PARTITION_ENV] = ",".join(map(str, self.partition))
        if self.beside is not None and is_cpu_build():
            environment.setdefault(BINDING_ENV, cores_by_rank(self.pp * self.tp, self.beside))
        return environment


def write_prompts(path: Path, prompts: Sequence[TokenPrompt]) -> None:
    """Write prompts as token ids, so that both arms are given the very same ones.

    Raises StoreError where the file cannot be written.
    """
    with naming("write", str(path)), path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            line = {
                "id": prompt.sample_id,
                "prompt_token_ids": prompt.token_ids.tolist(),
                "metadata": prompt.metadata,
            }
            file.write(json.dumps(line) + "\n")


def run_arm(arm: Arm, prompts: Path, out: str | Path, log: Path) -> dict[str, Any]:
    """Capture one arm into ``out`` and return what ``stagetap capture --json`` said.

    Args:
        log: where the engine's own output goes.

    Raises:
        Refused: the capture was refused, for the reason that it gave.
        StageTapError: it failed, or a sample did, or the log cannot be written.
    """
    with naming("write", str(log)):
        errors = log.open("wb")
    with errors:
        child = subprocess.Popen(
            arm.command(prompts, out),
            env=arm.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        stdout, _ = child.communicate()
    except BaseException:
        # Not kill(): the capture ends its engine's processes, which nobody else knows.
        child.terminate()
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
        raise
    if child.returncode == 0:
        return dict(json.loads(stdout))
    raise _failure(arm, child.returncode, stdout, log)


def _failure(arm: Arm, returncode: int, stdout: bytes, log: Path) -> StageTapError:
    lines = log.read_text("utf-8", "replace").splitlines()
    where = f"the arm with {arm.pp} stage{'s' if arm.pp > 1 else ''}"
    for line in reversed(lines):
        if line.startswith(_REFUSED):
            return Refused(f"{where}: {line.removeprefix(_REFUSED)}")
        if line.startswith(_ERROR):
            return StageTapError(f"{where}: {line.removeprefix(_ERROR)}")
    if stdout:
        failures = json.loads(stdout).get("failures", [])
        if failures:
            return StageTapError(
                f"{where}: sample {failures[0]['sample_id']!r} failed: {failures[0]['error']}"
            )
    print("\n".join(lines[-_SHOWN_LOG_LINES:]), file=sys.stderr)
    return StageTapError(f"{where} ended with exit code {returncode}; the end of its log is above")
