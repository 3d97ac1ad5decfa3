"""How an exporting request ended, as its sender is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How an exporting request ended.

    Attributes:
        request_id: vLLM's id.
        params: goes out as ``kv_transfer_params.stagetap`` of the final output. ``suspended`` is in
            it, and true, when the request was turned away because exporting is suspended.
    """

    request_id: str
    params: dict[str, Any]

    @property
    def failed(self) -> bool:
        """Whether the request shall end with finish_reason ``error``."""
        return bool(self.params["state"] == "failed")
