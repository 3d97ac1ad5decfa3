"""Stands in for the connector's module on a vLLM without the hook points.

vLLM looks its connector class up while it builds the configuration, in the front end: the one
moment at which an unpatched vLLM can be refused before any worker starts.
"""

from __future__ import annotations

from typing import Any

from stagetap.engine.refusal import announced
from stagetap.engine.series import check_series
from stagetap.errors import Refused
from stagetap.options import CONNECTOR_NAME


def __getattr__(name: str) -> Any:
    if name != CONNECTOR_NAME:
        raise AttributeError(name)
    with announced():
        check_series()
        raise Refused("this vLLM was imported before it was patched; start Python again")
