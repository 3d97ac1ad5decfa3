"""What the scheduler side and the workers say to each other. Nothing else is shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    import numpy as np

    from stagetap.plan.balance import StageBudget
    from stagetap.publish.publisher import FragmentReport
    from stagetap.stores.base import SampleRef
    from stagetap.taps import StageTaps


@dataclass(frozen=True)
class WorkerFacts(KVConnectorHandshakeMetadata):
    """Said once by every worker at start, after its caches exist.

    Attributes:
        taps: the layers that this worker runs and the ids that it will capture.
        dtype: dtype of its taps, as vLLM spells it without ``torch.``.
        hidden_size: width of a tap.
        stream: what its taps are of; the environment of a node may say another one.
        cache_group: which of vLLM's KV cache groups holds its taps, None when it owns no tap.
        block_size: tokens in a page of that group.
        weights_fingerprint: what it loaded; must be the same everywhere.
        series_digest: which patch series its vLLM carries.
        nonces: what it read in its store; the scheduler side's own must be among them.
        budget: what it has left for KV blocks, None where that says nothing about partitions.
    """

    taps: StageTaps
    dtype: str
    hidden_size: int
    stream: str
    cache_group: int | None
    block_size: int
    weights_fingerprint: str
    series_digest: str
    nonces: tuple[str, ...]
    budget: StageBudget | None = None


@dataclass(frozen=True)
class SaveOrder:
    """One finished request whose taps every owning stage shall publish.

    Attributes:
        request_id: vLLM's id, under which the worker reports that it needs the pages no more.
        ref: run, sample and attempt.
        token_count: number of rows T.
        token_ids: int64 ``[T]``.
        block_ids: the request's pages in token order, by KV cache group.
        input_ids_stage: the stage whose fragment also holds the token ids.
    """

    request_id: str
    ref: SampleRef
    token_count: int
    token_ids: np.ndarray
    block_ids: dict[int, list[int]]
    input_ids_stage: int


@dataclass
class StepOrders(KVConnectorMetadata):
    """Scheduler to workers, with every step.

    Attributes:
        save: finished requests to publish.
        drop: attempts that ended; what is not published of them yet never will be.
        samples_nothing: no request of this step wants a token, so nobody needs logits.
    """

    save: list[SaveOrder] = field(default_factory=list)
    drop: list[SampleRef] = field(default_factory=list)
    samples_nothing: bool = False


@dataclass
class WorkerNews(KVConnectorWorkerMetadata):
    """Workers to scheduler, with every step in which something happened.

    Attributes:
        reports: fragments stored or failed.
        blocked: stages that can publish nothing any more, and why, or None that can again.
    """

    reports: list[FragmentReport]
    blocked: dict[int, str | None]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        if not isinstance(other, WorkerNews):
            raise TypeError(f"cannot merge a worker's news with {type(other).__name__}")
        return WorkerNews(self.reports + other.reports, self.blocked | other.blocked)
