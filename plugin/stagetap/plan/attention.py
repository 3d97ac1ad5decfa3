"""Kinds of attention: their weights on one GPU, and what they cache for a sequence.

``weights`` gives the shapes that vLLM 0.32.0 allocates. What is cached is of three kinds:
``token_bytes`` for every token, for at most ``window`` tokens of a sequence where that is not None,
and ``state_bytes`` once a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stagetap.plan.parallel import Parallel
from stagetap.plan.weights import Weight, column_parallel, replicated, row_parallel, vector

FLOAT32 = 4


class Attention(Protocol):
    """What a decoder layer attends with."""

    @property
    def window(self) -> int | None:
        """Tokens of a sequence whose cache is kept; None keeps all."""

    @property
    def label(self) -> str:
        """A word for tables."""

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        """Its weights on one rank."""

    def derived_elements(self, parallel: Parallel) -> int:
        """What vLLM computes from loaded weights and keeps beside them, in elements."""

    def token_bytes(self, parallel: Parallel, kv_itemsize: int) -> int:
        """Cache bytes for one token on one rank."""

    def state_bytes(self, parallel: Parallel, itemsize: int) -> int:
        """Cache bytes for one sequence, however long, on one rank."""


@dataclass(frozen=True)
class GroupedAttention:
    """Softmax attention with ``heads`` query heads over ``kv_heads`` shared ones.

    Attributes:
        gated: queries come with a gate of their own size.
        sinks: one learned sink a head.
        head_norms: a norm over each query and key head.
        whole_norms: a norm over all queries together, and one over all keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    whole_norms: bool = False
    gated: bool = False
    sinks: bool = False

    @property
    def label(self) -> str:
        return "full" if self.window is None else f"window {self.window}"

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        heads = parallel.share("num_attention_heads", self.heads)
        kv_heads = parallel.kv_heads(self.kv_heads)
        parts = 2 if self.gated else 1
        width = self.heads * self.head_dim
        found = column_parallel(
            f"{prefix}.q_proj", width * parts, hidden, heads * self.head_dim * parts, self.qkv_bias
        )
        for name in ("k_proj", "v_proj"):
            found += column_parallel(
                f"{prefix}.{name}",
                self.kv_heads * self.head_dim,
                hidden,
                kv_heads * self.head_dim,
                self.qkv_bias,
            )
        found += row_parallel(
            f"{prefix}.o_proj", hidden, width, heads * self.head_dim, self.output_bias
        )
        if self.head_norms:
            found += [vector(f"{prefix}.{name}", self.head_dim) for name in ("q_norm", "k_norm")]
        if self.whole_norms:
            keys = self.kv_heads * self.head_dim
            found += [vector(f"{prefix}.q_norm", width), vector(f"{prefix}.k_norm", keys)]
        if self.sinks:
            found.append(vector(f"{prefix}.sinks", self.heads, heads))
        return found

    def derived_elements(self, parallel: Parallel) -> int:
        return 0

    def token_bytes(self, parallel: Parallel, kv_itemsize: int) -> int:
        return 2 * parallel.kv_heads(self.kv_heads) * self.head_dim * kv_itemsize

    def state_bytes(self, parallel: Parallel, itemsize: int) -> int:
        return 0


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): one latent vector a token, on every rank.

    Attributes:
        query_rank: rank of the queries' own latent, None where they are projected at once.
        gated: an output gate as wide as the attention's output.
    """

    heads: int
    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    gated: bool = False
    window: int | None = None

    @property
    def label(self) -> str:
        return "MLA"

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        heads = parallel.share("num_attention_heads", self.heads)
        query, value = self.nope_dim + self.rope_dim, self.value_dim
        found: list[Weight] = []
        if self.query_rank is None:
            found += column_parallel(
                f"{prefix}.q_proj", self.heads * query, hidden, heads * query, False
            )
        else:
            found.append(replicated(f"{prefix}.q_a_proj", self.query_rank, hidden))
            found.append(vector(f"{prefix}.q_a_layernorm", self.query_rank))
            found += column_parallel(
                f"{prefix}.q_b_proj", self.heads * query, self.query_rank, heads * query, False
            )
        found.append(
            replicated(f"{prefix}.kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, hidden)
        )
        found.append(vector(f"{prefix}.kv_a_layernorm", self.kv_rank))
        both = self.nope_dim + value
        found += column_parallel(
            f"{prefix}.kv_b_proj", self.heads * both, self.kv_rank, heads * both, False
        )
        if self.gated:
            found += column_parallel(
                f"{prefix}.g_proj", self.heads * value, hidden, heads * value, False
            )
        found += row_parallel(f"{prefix}.o_proj", hidden, self.heads * value, heads * value, False)
        return found

    def derived_elements(self, parallel: Parallel) -> int:
        # W_UK and W_UV, kv_b_proj once more in the layout of decoding.
        heads = parallel.share("num_attention_heads", self.heads)
        return heads * (self.nope_dim + self.value_dim) * self.kv_rank

    def token_bytes(self, parallel: Parallel, kv_itemsize: int) -> int:
        return (self.kv_rank + self.rope_dim) * kv_itemsize

    def state_bytes(self, parallel: Parallel, itemsize: int) -> int:
        return 0


@dataclass(frozen=True)
class KimiDeltaAttention:
    """Kimi delta attention (KDA): a state matrix a head instead of a cache.

    Attributes:
        full_rank_gate: the output gate is one matrix (Kimi-K3), not two of low rank (Kimi-Linear).
    """

    heads: int
    head_dim: int
    conv: int
    full_rank_gate: bool
    window: int | None = None

    @property
    def label(self) -> str:
        return "KDA"

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        heads = parallel.share("linear_attn_config.num_heads", self.heads)
        width, local = self.heads * self.head_dim, heads * self.head_dim
        found: list[Weight] = []
        for name in ("q_proj", "k_proj", "v_proj", *(("g_proj",) if self.full_rank_gate else ())):
            found += column_parallel(f"{prefix}.{name}", width, hidden, local, False)
        if not self.full_rank_gate:
            found.append(replicated(f"{prefix}.g_a_proj", self.head_dim, hidden))
            found += column_parallel(f"{prefix}.g_b_proj", width, self.head_dim, local, False)
        found.append(replicated(f"{prefix}.f_a_proj", self.head_dim, hidden))
        found += column_parallel(f"{prefix}.f_b_proj", width, self.head_dim, local, False)
        found += column_parallel(f"{prefix}.b_proj", self.heads, hidden, heads, False)
        if self.full_rank_gate:
            # One matrix in vLLM, of whole multiples of 16 rows on each rank.
            padding = -(4 * local + self.head_dim + heads) % 16
            found.append(Weight(f"{prefix}.padding", "sharded", padding, hidden, 0))
        found.append(
            vector(f"{prefix}.conv1d", 3 * width * self.conv, 3 * local * self.conv, FLOAT32)
        )
        found.append(vector(f"{prefix}.A_log", self.heads, heads, FLOAT32))
        found.append(vector(f"{prefix}.dt_bias", width, local, FLOAT32))
        found.append(vector(f"{prefix}.o_norm", self.head_dim))
        found += row_parallel(f"{prefix}.o_proj", hidden, width, local, False)
        return found

    def derived_elements(self, parallel: Parallel) -> int:
        return 0

    def token_bytes(self, parallel: Parallel, kv_itemsize: int) -> int:
        return 0

    def state_bytes(self, parallel: Parallel, itemsize: int) -> int:
        heads = parallel.share("linear_attn_config.num_heads", self.heads)
        conv = 3 * heads * self.head_dim * (self.conv - 1) * itemsize
        return conv + heads * self.head_dim * self.head_dim * FLOAT32


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta net (Qwen3-Next, Qwen3.5): a state matrix a value head instead of a cache.

    Attributes:
        state_itemsize: bytes per element of the state; None is the model's dtype.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    state_itemsize: int | None = None
    window: int | None = None

    @property
    def label(self) -> str:
        return "GDN"

    def weights(self, prefix: str, hidden: int, parallel: Parallel) -> list[Weight]:
        key_heads, value_heads = self._local(parallel)
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        local_keys, local_values = key_heads * self.key_dim, value_heads * self.value_dim
        conv, local_conv = 2 * keys + values, 2 * local_keys + local_values
        return [
            *column_parallel(
                f"{prefix}.in_proj_qkvz",
                2 * (keys + values),
                hidden,
                2 * (local_keys + local_values),
                False,
            ),
            *column_parallel(
                f"{prefix}.in_proj_ba", 2 * self.value_heads, hidden, 2 * value_heads, False
            ),
            vector(f"{prefix}.conv1d", conv * self.conv, local_conv * self.conv),
            vector(f"{prefix}.A_log", self.value_heads, value_heads, FLOAT32),
            vector(f"{prefix}.dt_bias", self.value_heads, value_heads),
            vector(f"{prefix}.norm", self.value_dim),
            *row_parallel(f"{prefix}.out_proj", hidden, values, local_values, False),
        ]

    def derived_elements(self, parallel: Parallel) -> int:
        return 0

    def token_bytes(self, parallel: Parallel, kv_itemsize: int) -> int:
        return 0

    def state_bytes(self, parallel: Parallel, itemsize: int) -> int:
        key_heads, value_heads = self._local(parallel)
        conv = (2 * key_heads * self.key_dim + value_heads * self.value_dim) * (self.conv - 1)
        state = value_heads * self.value_dim * self.key_dim
        return conv * itemsize + state * (self.state_itemsize or itemsize)

    def _local(self, parallel: Parallel) -> tuple[int, int]:
        return (
            parallel.share("linear_num_key_heads", self.key_heads),
            parallel.share("linear_num_value_heads", self.value_heads),
        )
