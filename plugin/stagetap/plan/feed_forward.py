"""Dense and mixture-of-experts blocks: their weights on one GPU, as vLLM 0.32.0 allocates them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stagetap.plan.parallel import Parallel
from stagetap.plan.weights import Weight, column_parallel, replicated, row_parallel, vector

FLOAT32 = 4


class FeedForward(Protocol):
    """What a decoder layer does behind its attention."""

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        """Its weights on one rank, ``prefix`` being the decoder layer's."""


@dataclass(frozen=True)
class DenseBlock:
    """Gate, up and down projections of one width."""

    width: int
    bias: bool = False
    name: str = "mlp"
    dimension: str = "intermediate_size"

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        local = parallel.share(self.dimension, self.width)
        module = f"{prefix}.{self.name}"
        return [
            *column_parallel(f"{module}.gate_proj", self.width, hidden, local, self.bias),
            *column_parallel(f"{module}.up_proj", self.width, hidden, local, self.bias),
            *row_parallel(f"{module}.down_proj", hidden, self.width, local, self.bias),
        ]


@dataclass(frozen=True)
class ExpertBlock:
    """A router, ``experts`` routed experts, and perhaps shared ones.

    Attributes:
        width: of one expert.
        name: of the block in a checkpoint.
        projections: names of an expert's gate, up and down projections there.
        latent: width of the space that routed experts work in, None for the model's own.
        latent_norm: a norm behind the routed experts.
        shared_width: of all shared experts together.
        shared_name: of theirs in a checkpoint.
        shared_gate: a scalar gate on the shared experts.
        correction: a bias of the router's scores, in float32.
        bias: biases of router and experts.
        narrowest: where tensor parallelism would leave an expert narrower, vLLM pads it to this.
    """

    experts: int
    width: int
    name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    latent: int | None = None
    latent_norm: bool = False
    shared_width: int = 0
    shared_name: str = "shared_experts"
    shared_gate: bool = False
    correction: bool = False
    bias: bool = False
    narrowest: int = 0

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        module = f"{prefix}.{self.name}"
        found = [replicated(f"{module}.gate", self.experts, hidden, linear=False)]
        if self.bias:
            found.append(vector(f"{module}.gate.bias", self.experts))
        if self.correction:
            found.append(vector(f"{module}.gate.correction", self.experts, itemsize=FLOAT32))
        if self.latent is not None:
            found.append(replicated(f"{module}.routed_expert_down_proj", self.latent, hidden))
            found.append(replicated(f"{module}.routed_expert_up_proj", hidden, self.latent))
            if self.latent_norm:
                found.append(vector(f"{module}.routed_expert_norm", self.latent))
        found += self._routed(f"{module}.experts", self.latent or hidden, parallel)
        if self.shared_width:
            shared = DenseBlock(
                self.shared_width,
                name=f"{self.name}.{self.shared_name}",
                dimension="width of the shared experts",
            )
            found += shared.weights(prefix, hidden, parallel)
        if self.shared_gate:
            found.append(replicated(f"{module}.shared_expert_gate", 1, hidden, linear=False))
        return found

    def _routed(self, module: str, inner: int, parallel: Parallel) -> list[Weight]:
        copies = parallel.experts(self.experts)
        local = parallel.expert_width("moe_intermediate_size", self.width)
        if not parallel.expert_parallel and parallel.tp > 1:
            local = max(local, self.narrowest)
        gate, up, down = self.projections
        whole = self.experts * self.width * inner

        def expert(name: str, rows: int, columns: int, elements: int) -> Weight:
            path = f"{module}.0.{name}"
            return Weight(path, "routed_experts", rows, columns, elements, copies)

        found = [
            expert(gate, local, inner, whole),
            expert(up, local, inner, whole),
            expert(down, inner, local, whole),
        ]
        if self.bias:
            for name, rows, width in (("13", 2 * local, 2 * self.width), ("2", inner, inner)):
                found.append(
                    Weight(
                        f"{module}.w{name}_bias",
                        "routed_experts",
                        rows,
                        1,
                        self.experts * width,
                        copies,
                        linear=False,
                    )
                )
        return found
