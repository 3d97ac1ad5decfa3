# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A general plugin sees every finished request in the front end, and may refuse it."""

from collections import defaultdict
from unittest.mock import MagicMock

import pytest

from vllm import PoolingParams
from vllm.plugins import hooks
from vllm.v1.engine.input_processor import InputProcessor


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def process(processor):
    prompt = {"type": "token", "prompt_token_ids": [1, 2, 3]}
    return InputProcessor.process_inputs(
        processor, "request", prompt, PoolingParams(), ("embed",)
    )


def test_the_request_is_finished():
    seen = []
    hooks.register_hook("request", lambda *given: seen.append(given))
    processor = MagicMock()
    request = process(processor)
    assert seen == [(processor.vllm_config, request)]
    assert request.prompt_token_ids == [1, 2, 3]


def test_a_plugin_refuses():
    def refuse(config, request):
        raise ValueError(f"refused {request.request_id}")

    hooks.register_hook("request", refuse)
    with pytest.raises(ValueError, match="refused request"):
        process(MagicMock())
