"""Connectors for the tests of StageTap beside others in vLLM's MultiConnector."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class Nothing(KVConnectorMetadata):
    """What these connectors tell their workers."""


class Producing(KVConnectorBase_V1, SupportsHMA):
    """Keeps the pages of every finished request for a few steps, as one that sends them would."""

    STEPS = 3

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._finished: Counter[str] = Counter()  # steps to wait, by request

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        self._finished.update(dict.fromkeys(finished_req_ids, self.STEPS))
        self._finished.subtract(dict.fromkeys(self._finished, 1))
        sent = {name for name, steps in self._finished.items() if steps <= 0}
        for name in sent:
            del self._finished[name]
        return sent or None, None

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return True, {"producing": {"request": request.request_id}}


class Loading(Producing):
    """Says that it only produces, and brings KV for whole blocks of prompts that start with 77."""

    BLOCK = 32

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        if request.prompt_token_ids[0] != 77:
            return 0, False
        whole = (request.num_prompt_tokens - 1) // self.BLOCK * self.BLOCK
        return max(0, whole - computed), False

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None


class NoGroups(KVConnectorBase_V1):
    """Knows one KV cache group only."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()
