# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Named points at which general plugins may act."""

from collections import defaultdict

import pytest

from vllm.plugins import hooks


@pytest.fixture(autouse=True)
def fresh_hooks(monkeypatch):
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))


def test_functions_run_in_the_order_of_their_registration():
    seen = []
    hooks.register_hook("point", lambda value: seen.append(("first", value)))
    hooks.register_hook("point", lambda value: seen.append(("second", value)))
    hooks.run_hooks("point", 1)
    assert seen == [("first", 1), ("second", 1)]


def test_a_function_is_registered_once():
    seen = []

    def function(value):
        seen.append(value)

    hooks.register_hook("point", function)
    hooks.register_hook("point", function)
    hooks.run_hooks("point", 1)
    assert seen == [1]


def test_a_point_without_functions_does_nothing():
    hooks.run_hooks("nobody", 1)
    assert not hooks._hooks


def test_what_a_function_raises_is_raised_at_the_point():
    def refuse(value):
        raise RuntimeError(f"refused {value}")

    hooks.register_hook("point", refuse)
    with pytest.raises(RuntimeError, match="refused 1"):
        hooks.run_hooks("point", 1)
