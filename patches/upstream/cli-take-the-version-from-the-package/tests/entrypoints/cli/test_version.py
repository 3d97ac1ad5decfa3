# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The command knows its version whatever its distribution is called."""

import importlib.metadata
import sys

import pytest

from vllm.entrypoints.cli import main as cli
from vllm.version import __version__


def test_version_of_a_build_with_another_name(monkeypatch, capsys):
    ask = importlib.metadata.version

    def version(name):
        if name == "vllm":
            raise importlib.metadata.PackageNotFoundError(name)
        return ask(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(sys, "argv", ["vllm", "--version"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert __version__ in capsys.readouterr().out
