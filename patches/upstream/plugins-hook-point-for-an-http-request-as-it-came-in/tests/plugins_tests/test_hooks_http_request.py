# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A general plugin sees the body of a request before it is split into prompts."""

import asyncio
from collections import defaultdict
from unittest.mock import MagicMock

import pytest

from vllm.entrypoints.serve.engine.serving import BaseServing
from vllm.plugins import hooks


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def test_the_body_is_whole():
    seen = []
    hooks.register_hook("http_request", lambda *given: seen.append(given))
    serving, request = MagicMock(), MagicMock(prompt=["one", "two"])
    asyncio.run(BaseServing._check_model(serving, request))
    assert seen == [(serving, request)]


def test_a_plugin_refuses():
    def refuse(serving, request):
        raise ValueError(f"refused {len(request.prompt)} prompts")

    hooks.register_hook("http_request", refuse)
    with pytest.raises(ValueError, match="refused 2 prompts"):
        asyncio.run(
            BaseServing._check_model(MagicMock(), MagicMock(prompt=["one", "two"]))
        )
