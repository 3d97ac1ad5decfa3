# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A general plugin adds flags to `vllm serve` and turns them into engine arguments."""

from collections import defaultdict

import pytest

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.plugins import hooks
from vllm.utils.argparse_utils import FlexibleArgumentParser


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def test_a_flag_becomes_a_field():
    def apply_flag(args):
        args.seed = args.plugin_seed

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())  # loads plugins
    hooks.register_hook(
        "cli_args", lambda parser: parser.add_argument("--plugin-seed", type=int)
    )
    hooks.register_hook("parsed_args", apply_flag)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "m", "--plugin-seed", "7"])
    assert EngineArgs.from_cli_args(args).seed == 7
