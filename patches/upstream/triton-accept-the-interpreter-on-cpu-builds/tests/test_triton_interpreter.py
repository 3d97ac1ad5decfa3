# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""TRITON_INTERPRET=1 runs kernels in Python, so a CPU build may keep Triton."""

import os
import subprocess
import sys

import pytest

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("only CPU builds switch Triton off", allow_module_level=True)
pytest.importorskip("triton")

PRINT = "from vllm.triton_utils import HAS_TRITON; print(f'has={HAS_TRITON}')"


def test_the_interpreter_is_accepted():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PRINT], env=environment, capture_output=True, text=True
    )
    assert "has=True" in done.stdout, done.stderr
