"""Running ``stagetap`` inside the test process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from stagetap.cli import main


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """What stands on stdout, which must be one line."""
        assert self.stdout.count("\n") == 1, self.stdout
        return json.loads(self.stdout)


Command = Callable[..., Outcome]


def make_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """A function that runs ``stagetap`` with these arguments."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["stagetap", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return run
