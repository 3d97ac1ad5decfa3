# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A general plugin sees the configuration once it is complete, and may refuse it."""

from collections import defaultdict

import pytest

from vllm.config import VllmConfig
from vllm.plugins import hooks


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def test_the_configuration_is_complete():
    seen = []
    hooks.register_hook(
        "vllm_config", lambda config: seen.append(config.compilation_config.mode)
    )
    config = VllmConfig()
    assert seen == [config.compilation_config.mode]
    assert seen[0] is not None


def test_a_plugin_refuses():
    def refuse(config):
        raise RuntimeError("refused by a plugin")

    hooks.register_hook("vllm_config", refuse)
    with pytest.raises(RuntimeError, match="refused by a plugin"):
        VllmConfig()
