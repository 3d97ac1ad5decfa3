# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A general plugin hears of an offline beam search before it becomes many requests."""

from collections import defaultdict
from unittest.mock import MagicMock

import pytest

from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
from vllm.plugins import hooks
from vllm.sampling_params import BeamSearchParams


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def test_a_plugin_refuses_before_any_request():
    def refuse(config):
        raise ValueError(f"refused {config}")

    hooks.register_hook("beam_search", refuse)
    llm = MagicMock()
    llm.llm_engine.vllm_config = "config"
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    with pytest.raises(ValueError, match="refused config"):
        BeamSearchOfflineMixin.beam_search(llm, ["prompt"], params)
    assert not llm.method_calls
