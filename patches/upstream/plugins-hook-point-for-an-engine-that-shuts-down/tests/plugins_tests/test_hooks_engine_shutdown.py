# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A general plugin hears once that an engine stops, before what is in flight is drained."""

from collections import defaultdict
from unittest.mock import MagicMock

import pytest

from vllm.plugins import hooks
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def test_a_plugin_hears_once():
    seen = []
    hooks.register_hook("engine_shutdown", lambda *given: seen.append(given))
    engine = MagicMock(shutdown_state=EngineShutdownState.REQUESTED)
    engine.vllm_config.shutdown_timeout = 30
    engine.scheduler.get_num_unfinished_requests.return_value = 1
    assert EngineCoreProc._handle_shutdown(engine)
    assert engine.shutdown_state == EngineShutdownState.SHUTTING_DOWN
    EngineCoreProc._handle_shutdown(engine)
    assert seen == [(engine.vllm_config, engine.scheduler)]


def test_a_running_engine_says_nothing():
    seen = []
    hooks.register_hook("engine_shutdown", lambda *given: seen.append(given))
    engine = MagicMock(shutdown_state=EngineShutdownState.RUNNING)
    assert EngineCoreProc._handle_shutdown(engine)
    assert not seen
