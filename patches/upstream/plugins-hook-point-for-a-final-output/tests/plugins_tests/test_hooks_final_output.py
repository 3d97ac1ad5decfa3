# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A general plugin says why a request of its own has failed, with a status."""

import asyncio
from collections import defaultdict
from http import HTTPStatus
from unittest.mock import AsyncMock, MagicMock

import pytest

from vllm import RequestOutput, SamplingParams
from vllm.exceptions import GracefulHTTPError
from vllm.plugins import hooks
from vllm.v1.engine.async_llm import AsyncLLM


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def output(finished):
    return RequestOutput(
        request_id="request",
        prompt=None,
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=[],
        finished=finished,
    )


def generate(received):
    """What generate() yields when the engine answers with one unfinished output and a last one."""
    answers = [output(False), output(True)]
    queue = MagicMock(get_nowait=lambda: answers.pop(0))
    engine = MagicMock(add_request=AsyncMock(return_value=queue), abort=AsyncMock())

    async def run():
        async for each in AsyncLLM.generate(engine, "p", SamplingParams(), "request"):
            received.append(each.finished)

    asyncio.run(run())


def test_the_last_output_alone_is_seen():
    seen, received = [], []
    hooks.register_hook("final_output", lambda out: seen.append(out.finished))
    generate(received)
    assert seen == [True]
    assert received == [False, True]


def test_an_error_takes_the_place_of_the_last_output():
    def fail(out):
        raise GracefulHTTPError("the store is full", HTTPStatus.SERVICE_UNAVAILABLE)

    received = []
    hooks.register_hook("final_output", fail)
    with pytest.raises(GracefulHTTPError, match="the store is full"):
        generate(received)
    assert received == [False]
