"""The K3 draft once more: plain loops over tokens, heads and keys in Python floats.

Written from the published description and vLLM's serving code, not from the class under test. Only
the tensors' names are shared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Vector = list[float]
Weights = Mapping[str, Any]


def rows(weights: Weights, name: str) -> Any:
    return weights[f"{name}.weight"].double().tolist()


def project(matrix: Sequence[Vector], x: Vector) -> Vector:
    return [math.fsum(m * v for m, v in zip(row, x, strict=True)) for row in matrix]


def norm(weight: Vector, x: Vector, eps: float) -> Vector:
    root = math.sqrt(math.fsum(v * v for v in x) / len(x) + eps)
    return [v / root * w for v, w in zip(x, weight, strict=True)]


def add(x: Vector, y: Vector) -> Vector:
    return [a + b for a, b in zip(x, y, strict=True)]


def frequencies(dim: int, rope: Mapping[str, Any]) -> Vector:
    """YaRN: slow pairs are interpolated, fast ones kept, a ramp between; plain without a factor."""
    base = rope["rope_theta"]
    plain = [base ** (-2 * i / dim) for i in range(dim // 2)]
    if rope["rope_type"] == "default":
        return plain

    def pair_that_turns(rotations: float) -> float:
        length = rope["original_max_position_embeddings"]
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(pair_that_turns(rope["beta_fast"])), 0)
    high = min(math.ceil(pair_that_turns(rope["beta_slow"])), dim - 1)
    width = max(high - low, 0.001)
    ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(dim // 2)]
    return [f * (1 - r) + f / rope["factor"] * r for f, r in zip(plain, ramp, strict=True)]


def turn(x: Vector, position: int, inverse: Vector) -> Vector:
    """Neighbours are one pair."""
    turned = []
    for i, frequency in enumerate(inverse):
        c, s = math.cos(position * frequency), math.sin(position * frequency)
        even, odd = x[2 * i], x[2 * i + 1]
        turned += [even * c - odd * s, odd * c + even * s]
    return turned


def softmax_scale(config: Any, rope: Mapping[str, Any]) -> float:
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if rope["rope_type"] == "yarn":
        scale *= (0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1) ** 2
    return scale


def block_states(
    weights: Weights,
    config: Any,
    rope: Mapping[str, Any],
    context: Sequence[Vector],
    context_positions: Sequence[int],
    anchor_token: int,
    anchor_position: int,
) -> list[Vector]:
    """Final states of one block over the context that it may see.

    Args:
        context: taps side by side, one row a token before the anchor.
    """
    eps, layers = config.rms_norm_eps, config.num_hidden_layers
    tokens = [anchor_token] + [config.mask_token_id] * (config.block_size - 1)
    positions = [anchor_position + i for i in range(config.block_size)]
    states = [rows(weights, "embed_tokens")[token] for token in tokens]
    if config.fc_norm:
        context = [_norm_taps(weights, config, taps) for taps in context]
    seen = [
        norm(rows(weights, "context_norm"), project(rows(weights, "context_proj"), taps), eps)
        for taps in context
    ]
    for layer in range(layers):
        name = f"layers.{layer}"
        normed = [norm(rows(weights, f"{name}.input_layernorm"), x, eps) for x in states]
        attended = _attend(
            weights,
            f"{name}.self_attn",
            config,
            rope,
            normed,
            positions,
            seen,
            context_positions,
        )
        states = [add(x, a) for x, a in zip(states, attended, strict=True)]
        for i, x in enumerate(states):
            y = norm(rows(weights, f"{name}.post_attention_layernorm"), x, eps)
            gate = project(rows(weights, f"{name}.mlp.gate_proj"), y)
            up = project(rows(weights, f"{name}.mlp.up_proj"), y)
            inner = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
            states[i] = add(x, project(rows(weights, f"{name}.mlp.down_proj"), inner))
    return [norm(rows(weights, "final_norm"), x, eps) for x in states]


def _norm_taps(weights: Weights, config: Any, taps: Vector) -> Vector:
    width, normed = config.hidden_size, []
    for i in range(len(config.target_layer_ids)):
        tap = taps[i * width : (i + 1) * width]
        normed += norm(rows(weights, f"fc_norm.{i}"), tap, config.rms_norm_eps)
    return normed


def _attend(
    weights: Weights,
    name: str,
    config: Any,
    rope: Mapping[str, Any],
    block: Sequence[Vector],
    block_positions: Sequence[int],
    context: Sequence[Vector],
    context_positions: Sequence[int],
) -> list[Vector]:
    eps, nope, turned = config.rms_norm_eps, config.qk_nope_head_dim, config.qk_rope_head_dim
    inverse = frequencies(turned, rope)
    scale = softmax_scale(config, rope)
    entries = []  # of everything that can be looked at: its latent, normed, and its turned key
    for x, position in [
        *zip(context, context_positions, strict=True),
        *zip(block, block_positions, strict=True),
    ]:
        compressed = project(rows(weights, f"{name}.kv_a_proj_with_mqa"), x)
        latent = norm(
            rows(weights, f"{name}.kv_a_layernorm"), compressed[: config.kv_lora_rank], eps
        )
        expanded = project(rows(weights, f"{name}.kv_b_proj"), latent)
        entries.append((expanded, turn(compressed[config.kv_lora_rank :], position, inverse)))

    outputs = []
    for x, position in zip(block, block_positions, strict=True):
        low = norm(
            rows(weights, f"{name}.q_a_layernorm"),
            project(rows(weights, f"{name}.q_a_proj"), x),
            eps,
        )
        queries = project(rows(weights, f"{name}.q_b_proj"), low)
        heads: Vector = []
        for head in range(config.num_attention_heads):
            start = head * (nope + turned)
            q_nope = queries[start : start + nope]
            q_rope = turn(queries[start + nope : start + nope + turned], position, inverse)
            first = head * (nope + config.v_head_dim)
            scores = [
                scale
                * math.fsum(
                    a * b
                    for a, b in zip(q_nope + q_rope, kv[first : first + nope] + k_rope, strict=True)
                )
                for kv, k_rope in entries
            ]
            most = max(scores)
            exps = [math.exp(s - most) for s in scores]
            total = math.fsum(exps)
            for d in range(config.v_head_dim):
                values = [kv[first + nope + d] for kv, _ in entries]
                heads.append(math.fsum(e * v for e, v in zip(exps, values, strict=True)) / total)
        outputs.append(project(rows(weights, f"{name}.o_proj"), heads))
    return outputs
