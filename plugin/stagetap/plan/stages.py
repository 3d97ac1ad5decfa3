"""A capture on a target, stage by stage: who owns which tap, and the memory of one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stagetap.errors import Refused
from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.options import ConnectorOptions
from stagetap.partition import stage_layers
from stagetap.plan.balance import Advice, Balance, better_partition
from stagetap.plan.model import DecoderLayer, Model
from stagetap.plan.parallel import Parallel
from stagetap.plan.weights import KINDS, Kind, Weight
from stagetap.taps import owned_ids, validate_layer_ids
from stagetap.wording import shown

TOKEN_ID_BYTES = 8
"""``input_ids`` are int64, stored once a sample."""

BLOCK_TOKENS = 16
"""vLLM's usual block size; the advice about partitions does not depend on it."""

_STAGING = ConnectorOptions(layers=(), store="")  # for its defaults


@dataclass(frozen=True)
class Budget:
    """What a GPU has, and what of it the plan cannot tell from shapes.

    Attributes:
        gpu_bytes: memory of one GPU.
        utilization: the share of it that vLLM may use.
        reserve_bytes: for activations, CUDA graphs and what else vLLM measures at start.
    """

    gpu_bytes: int
    utilization: float
    reserve_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Memory for weights, cache and taps."""
        return int(self.gpu_bytes * self.utilization) - self.reserve_bytes


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; sizes are those of one of its GPUs, in bytes, unless they say otherwise.

    Attributes:
        start, end: its decoder layers ``[start, end)``.
        layer_ids: taps that it owns, ascending.
        weight_bytes: by kind.
        derived_bytes: what vLLM computes from weights and keeps beside them.
        kv_token_bytes: KV cache of one token, layers with a window or a state left out.
        window_bytes: KV cache of one sequence in layers with a window, when it is full.
        state_bytes: states of one sequence in linear-attention layers.
        tap_token_bytes: taps of one token.
        capture_bytes: fixed buffers in which the taps of one step wait for their pages.
        staging_host_bytes: host memory of the first rank, through which fragments pass.
        available_bytes: what is left for cache and taps, less than 0 where the weights do not fit;
            None without a budget.
        tokens: how many tokens fit, at sequences of the plan's length; None without a budget.
    """

    index: int
    start: int
    end: int
    layer_ids: tuple[int, ...]
    weight_bytes: dict[Kind, int]
    derived_bytes: int
    kv_token_bytes: int
    window_bytes: int
    state_bytes: int
    tap_token_bytes: int
    capture_bytes: int
    staging_host_bytes: int
    available_bytes: int | None
    tokens: int | None

    @property
    def fixed_bytes(self) -> int:
        """GPU memory that is taken before the first block: weights and capture buffers."""
        return sum(self.weight_bytes.values()) + self.derived_bytes + self.capture_bytes


@dataclass(frozen=True)
class Plan:
    """A capture, as far as a configuration tells.

    Attributes:
        layer_ids: in the order asked.
        stream: what they are of.
        kv_cache_dtype: as asked; ``auto`` is the model's dtype.
        sequence_tokens: length of the sequences that capacities are told for.
        batched_tokens: tokens of one step, which size the capture buffers.
        stored_token_bytes: what a store takes for one token, its id included.
        relay_token_bytes: what handing taps on to the last stage would send between stages for one
            token, over all boundaries.
        advice: another partition that would hold more, None where none is worth it or there is no
            budget.
        advice_without_taps: whether an engine that captures nothing would be advised the same.
    """

    model: Model
    parallel: Parallel
    partition: tuple[int, ...]
    layer_ids: tuple[int, ...]
    stream: str
    kv_cache_dtype: str
    sequence_tokens: int
    batched_tokens: int
    budget: Budget | None
    stages: tuple[Stage, ...]
    stored_token_bytes: int
    relay_token_bytes: int
    advice: Advice | None
    advice_without_taps: bool

    @property
    def fits(self) -> bool | None:
        """Whether vLLM would start: every stage holds a whole sequence; None without a budget."""
        if self.budget is None:
            return None
        return not self.full_stages and (self.tokens is None or self.tokens >= self.sequence_tokens)

    @property
    def full_stages(self) -> tuple[int, ...]:
        """Stages whose weights leave no room for a cache."""
        return tuple(
            stage.index
            for stage in self.stages
            if stage.available_bytes is not None and stage.available_bytes <= 0
        )

    @property
    def tokens(self) -> int | None:
        """Tokens that the smallest stage holds, and so all do."""
        held = [stage.tokens for stage in self.stages if stage.tokens is not None]
        return min(held) if held else None


def make_plan(
    model: Model,
    layer_ids: Sequence[int],
    parallel: Parallel,
    *,
    stream: str | None = None,
    partition: Sequence[int] | None = None,
    kv_cache_dtype: str = "auto",
    sequence_tokens: int | None = None,
    batched_tokens: int = 8192,
    budget: Budget | None = None,
) -> Plan:
    """Plan a capture.

    Args:
        stream: what taps are of, one of the model's ``streams`` and the first when absent: it says
            which stage owns a tap at a cut.
        partition: layers of every stage; vLLM's even split when absent.
        kv_cache_dtype: as vLLM's ``--kv-cache-dtype``.
        sequence_tokens: length of the sequences that capacities are told for; the model's longest
            when absent.
        batched_tokens: as vLLM's ``--max-num-batched-tokens``.
        budget: of a GPU; without one no capacities are told.

    Raises:
        Refused: ids, stream, stages or partition do not fit the model, or a dimension does not
            divide.
    """
    total = model.num_hidden_layers
    ids = validate_layer_ids(layer_ids, total)
    stream = stream or model.streams[0]
    if stream not in model.streams:
        raise Refused(
            f"stream {shown(stream)}: this model's taps are of {' or '.join(model.streams)}"
        )
    bounds = stage_layers(total, parallel.pp, partition)
    sequence = sequence_tokens or model.max_len
    if sequence is None:
        raise Refused(
            "config.json says no max_position_embeddings; give the longest sequence with --max-len"
        )
    if model.max_len is not None and sequence > model.max_len and not model.may_be_longer:
        raise Refused(
            f"--max-len {sequence} is above the {model.max_len} positions that config.json gives "
            f"the model, which vLLM refuses; use at most {model.max_len}"
        )
    kv_itemsize = _kv_itemsize(kv_cache_dtype, model)
    planner = _Planner(
        model=model,
        parallel=parallel,
        stream=stream,
        layers=tuple(_layer(model, index, parallel, kv_itemsize) for index in range(total)),
        sequence_tokens=sequence,
        batched_tokens=batched_tokens,
        budget=budget,
    )
    stages = tuple(planner.stage(index, *bound, ids) for index, bound in enumerate(bounds))
    advice, bare = planner.advice(bounds, ids), planner.advice(bounds, ())
    return Plan(
        model=model,
        parallel=parallel,
        partition=tuple(end - start for start, end in bounds),
        layer_ids=ids,
        stream=stream,
        kv_cache_dtype=kv_cache_dtype,
        sequence_tokens=sequence,
        batched_tokens=batched_tokens,
        budget=budget,
        stages=stages,
        stored_token_bytes=len(ids) * planner.tap_bytes + TOKEN_ID_BYTES,
        relay_token_bytes=planner.tap_bytes
        * sum((parallel.pp - 1 - stage.index) * len(stage.layer_ids) for stage in stages),
        advice=advice,
        advice_without_taps=bool(advice and bare and advice.partition == bare.partition),
    )


@dataclass(frozen=True)
class _Layer:
    """One decoder layer on one GPU."""

    weight_bytes: dict[Kind, int]
    derived_bytes: int
    token_bytes: int
    window: int | None
    state_bytes: int

    @property
    def fixed_bytes(self) -> int:
        return sum(self.weight_bytes.values()) + self.derived_bytes

    def cached_tokens(self, sequence: int) -> int:
        """Tokens of a sequence that are cached; a window keeps whole blocks, one of them partly."""
        if self.window is None:
            return sequence
        blocks = -(-(self.window - 1) // BLOCK_TOKENS) + 1
        return min(sequence, blocks * BLOCK_TOKENS)

    def sequence_bytes(self, sequence: int) -> int:
        return self.token_bytes * self.cached_tokens(sequence) + self.state_bytes


def _layer(model: Model, index: int, parallel: Parallel, kv_itemsize: int) -> _Layer:
    layer: DecoderLayer = model.layers[index]
    attention = layer.attention
    return _Layer(
        weight_bytes=_by_kind(model, layer.weights(index, model.hidden_size, parallel)),
        derived_bytes=attention.derived_elements(parallel) * model.itemsize,
        token_bytes=attention.token_bytes(parallel, kv_itemsize),
        window=attention.window,
        state_bytes=attention.state_bytes(parallel, model.itemsize),
    )


@dataclass(frozen=True)
class _Planner:
    """What all stages of a plan have in common."""

    model: Model
    parallel: Parallel
    stream: str
    layers: tuple[_Layer, ...]
    sequence_tokens: int
    batched_tokens: int
    budget: Budget | None

    @property
    def tap_bytes(self) -> int:
        """One tap of one token."""
        return self.model.hidden_size * self.model.itemsize

    @property
    def buffer_bytes(self) -> int:
        """The capture buffer of one tap."""
        return self.batched_tokens * self.tap_bytes

    def stage(self, index: int, start: int, end: int, asked: Sequence[int]) -> Stage:
        """One stage of this plan."""
        own = self.layers[start:end]
        ids = owned_ids(start, end, asked, len(self.layers), self.stream)
        weight_bytes = self._outer_bytes(index)
        for kind in KINDS:
            weight_bytes[kind] += sum(one.weight_bytes[kind] for one in own)
        derived = sum(one.derived_bytes for one in own)
        capture = len(ids) * self.buffer_bytes
        available = None
        if self.budget is not None:
            taken = sum(weight_bytes.values()) + derived + capture
            available = self.budget.usable_bytes - taken
        return Stage(
            index=index,
            start=start,
            end=end,
            layer_ids=ids,
            weight_bytes=weight_bytes,
            derived_bytes=derived,
            kv_token_bytes=sum(one.token_bytes for one in own if one.window is None),
            window_bytes=sum(
                one.sequence_bytes(self.sequence_tokens) for one in own if one.window is not None
            ),
            state_bytes=sum(one.state_bytes for one in own),
            tap_token_bytes=len(ids) * self.tap_bytes,
            capture_bytes=capture,
            staging_host_bytes=_STAGING.slots * _STAGING.slot_bytes if ids else 0,
            available_bytes=available,
            tokens=self._tokens(own, len(ids), available),
        )

    def advice(self, bounds: Sequence[tuple[int, int]], asked: Sequence[int]) -> Advice | None:
        """Whether another partition would hold more.

        One block is one whole sequence here, so that windows and states count for what they are.
        """
        if self.budget is None:
            return None
        stages = [self.stage(index, *bound, asked) for index, bound in enumerate(bounds)]
        return better_partition(
            Balance.measured(
                partition=[stage.end - stage.start for stage in stages],
                available_bytes=[stage.available_bytes or 0 for stage in stages],
                layer_weight_bytes=[one.fixed_bytes for one in self.layers],
                layer_block_bytes=[one.sequence_bytes(self.sequence_tokens) for one in self.layers],
                layer_ids=asked,
                tap_block_bytes=self.tap_bytes * self.sequence_tokens,
                tap_fixed_bytes=self.buffer_bytes,
                stream=self.stream,
            )
        )

    def _outer_bytes(self, index: int) -> dict[Kind, int]:
        last = index == self.parallel.pp - 1
        return _by_kind(self.model, self.model.outer_weights(index == 0, last, self.parallel))

    def _tokens(self, own: Sequence[_Layer], taps: int, available: int | None) -> int | None:
        cached = sum(one.sequence_bytes(self.sequence_tokens) for one in own)
        cached += taps * self.tap_bytes * self.sequence_tokens
        if available is None or not cached:
            return None
        return max(0, available) * self.sequence_tokens // cached


def _by_kind(model: Model, weights: Sequence[Weight]) -> dict[Kind, int]:
    found = dict.fromkeys(KINDS, 0)
    for weight in weights:
        found[weight.kind] += model.quantization.bytes_of(weight, model.itemsize)
    return found


def _kv_itemsize(kv_cache_dtype: str, model: Model) -> int:
    if kv_cache_dtype == "auto":
        return model.itemsize
    if kv_cache_dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        return 1
    if kv_cache_dtype not in DTYPE_ITEMSIZE:
        raise Refused(
            f"--kv-cache-dtype {kv_cache_dtype} is none that the plan knows; use auto, fp8, or one "
            f"of {', '.join(DTYPE_ITEMSIZE)}"
        )
    return DTYPE_ITEMSIZE[kv_cache_dtype]
