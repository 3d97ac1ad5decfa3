"""The generated parts of docs/plan.md and docs/layers.md; ``python -m plan_docs`` writes them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from unittest import mock

from stagetap.cli import main
from stagetap.layer_choice import DRAFT_KEYS

ROOT = Path(__file__).parents[1]
PLAN, LAYERS = ROOT / "docs" / "plan.md", ROOT / "docs" / "layers.md"

_COMMAND = re.compile(r"```console\n\$ (stagetap plan .*)\n(?:.*\n)*?```\n")
_KEYS = re.compile(r"(<!-- keys -->\n).*?(\n<!-- end of keys -->)", re.DOTALL)


def rendered_plan(text: str) -> str:
    """The page with the present output below every command of it."""
    return _COMMAND.sub(lambda found: f"```console\n$ {found[1]}\n{_output(found[1])}```\n", text)


def rendered_layers(text: str) -> str:
    """The page with the present table of keys."""
    rows = ["", "| key | add | read in vLLM 0.32.0 |", "|---|---|---|"]
    rows += [f"| `{key.name}` | {key.offset} | {key.evidence} |" for key in DRAFT_KEYS]
    rows.append("")
    return _KEYS.sub(lambda found: found[1] + "\n".join(rows) + found[2], text)


def _output(command: str) -> str:
    """What a command prints, stdout and stderr, run at the root of the repository."""
    printed = io.StringIO()
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        with (
            mock.patch.object(sys, "argv", shlex.split(command)),
            mock.patch.dict(os.environ, {"COLUMNS": "120"}),
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            contextlib.suppress(SystemExit),
        ):
            os.environ.pop("VLLM_PP_LAYER_PARTITION", None)
            main()
    finally:
        os.chdir(here)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


if __name__ == "__main__":
    PLAN.write_text(rendered_plan(PLAN.read_text("utf-8")), "utf-8")
    LAYERS.write_text(rendered_layers(LAYERS.read_text("utf-8")), "utf-8")
