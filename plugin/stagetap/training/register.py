"""Making speculators know StageTap's backend and drafts, before it looks."""

from __future__ import annotations

import importlib
import sys

from stagetap.errors import Refused

EXTRA = 'pip install "stagetap[train]"'

_READS_THE_REGISTRY = "speculators.train.config.resolution"


def register() -> None:
    """Register the backend ``stagetap`` and every draft of :mod:`stagetap.drafts`.

    Raises:
        Refused: speculators is not installed, or read its registry in this process before.
    """
    require_speculators()
    from hs_connectors import HiddenStatesBackend

    if "stagetap" not in HiddenStatesBackend.registry and _READS_THE_REGISTRY in sys.modules:
        raise Refused(
            "speculators' command line was imported before StageTap's backend and does not know "
            "it: call stagetap.training.register.register() first, or use stagetap train"
        )
    importlib.import_module("stagetap.training.backend")
    importlib.import_module("stagetap.drafts.k3_dspark")


def require_speculators() -> None:
    """Raises Refused, naming the extra, when what drafts are trained with is not installed."""
    try:
        importlib.import_module("hs_connectors")
        importlib.import_module("speculators")
    except ModuleNotFoundError as error:
        raise Refused(f"{error.name} is not installed: {EXTRA}") from None
