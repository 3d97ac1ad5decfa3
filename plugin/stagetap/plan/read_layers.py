"""Which attention and which feed-forward block each layer of a configuration has."""

from __future__ import annotations

from stagetap.config_values import CURE, ConfigValues
from stagetap.errors import Refused
from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.plan.attention import (
    Attention,
    GatedDeltaNet,
    GroupedAttention,
    KimiDeltaAttention,
    LatentAttention,
)
from stagetap.plan.feed_forward import DenseBlock, ExpertBlock, FeedForward
from stagetap.wording import shown

_HEAD_NORMS = ("qwen3", "gemma3")
_WHOLE_NORMS = {"olmo2", "olmoe"}
_QUERY_BIAS = {"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"}
_OUTPUT_BIAS = {"llama", "granite", "gpt_oss"}
_ALL_WINDOWED = {"mistral", "mixtral", "phi3"}


def attentions(
    values: ConfigValues, model_type: str, total: int, remarks: list[str]
) -> list[Attention]:
    kinds = _layer_kinds(values, model_type, total, remarks)
    linear = _linear_attention(values) if "linear" in kinds else None
    if "linear" in kinds and linear is None:
        raise Refused(
            f"{values.where} has linear-attention layers of an unknown kind; known are KDA "
            "(linear_attn_config) and gated delta nets (linear_num_value_heads)"
        )
    full = _softmax_attention(values, model_type, None)
    window = values.size_or_none("sliding_window")
    found: list[Attention] = []
    for kind in kinds:
        if kind == "linear":
            assert linear is not None
            found.append(linear)
        elif kind == "sliding":
            if window is None:
                raise Refused(f"{values.where} has sliding-attention layers and no sliding_window")
            found.append(_softmax_attention(values, model_type, window))
        else:
            found.append(full)
    return found


def _layer_kinds(
    values: ConfigValues, model_type: str, total: int, remarks: list[str]
) -> list[str]:
    """``full``, ``sliding`` or ``linear`` for every layer."""
    kda = values.section("linear_attn_config")
    if kda is not None and (numbered := kda.integers("kda_layers", least=1)):  # counted from 1
        return ["linear" if index + 1 in numbered else "full" for index in range(total)]
    if (types := values.texts("layer_types")) is not None:
        known = {
            "full_attention": "full",
            "sliding_attention": "sliding",
            "linear_attention": "linear",
        }
        if unknown := sorted(set(types) - set(known)):
            raise Refused(
                f"{values.where}: layer_types: the plan does not know {shown(unknown[0])}; known "
                f"are {', '.join(known)}"
            )
        if len(types) < total:
            raise Refused(f"{values.where}: layer_types names {len(types)} layers of {total}")
        return [known[name] for name in types[:total]]
    if values.size_or_none("linear_num_value_heads"):
        every = values.size_or("full_attention_interval", 4)
        return ["full" if (index + 1) % every == 0 else "linear" for index in range(total)]
    if values.size_or_none("sliding_window") is None or not values.flag("use_sliding_window", True):
        return ["full"] * total
    if model_type in _ALL_WINDOWED:
        return ["sliding"] * total
    period = _window_period(values, model_type)
    if period is None:
        remarks.append("sliding_window without layer_types: counted as full attention")
        return ["full"] * total
    return ["full" if (index + 1) % period == 0 else "sliding" for index in range(total)]


def _window_period(values: ConfigValues, model_type: str) -> int | None:
    """One layer in so many attends to everything; None where nothing is known of the model."""
    if model_type == "gemma3_text":
        return values.size_or("sliding_window_pattern", 6)
    return 2 if model_type in ("gpt_oss", "gemma2") else None


def _linear_attention(values: ConfigValues) -> Attention | None:
    if (kda := values.section("linear_attn_config")) is not None:
        return KimiDeltaAttention(
            heads=kda.size("num_heads"),
            head_dim=kda.size("head_dim"),
            conv=kda.size("short_conv_kernel_size"),
            full_rank_gate=kda.flag("use_full_rank_gate"),
        )
    if values.size_or_none("linear_num_value_heads") is None:
        return None
    state = values.text("mamba_ssm_dtype")
    key_heads = values.size("linear_num_key_heads")
    value_heads = values.size("linear_num_value_heads")
    _check_multiple(
        values, "linear_num_value_heads", value_heads, "linear_num_key_heads", key_heads
    )
    return GatedDeltaNet(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=values.size("linear_key_head_dim"),
        value_dim=values.size("linear_value_head_dim"),
        conv=values.size("linear_conv_kernel_dim"),
        state_itemsize=DTYPE_ITEMSIZE.get(state or ""),
    )


def _check_multiple(values: ConfigValues, name: str, size: int, of: str, part: int) -> None:
    """Heads share their keys in groups of one size. Raises Refused where they cannot."""
    if size % part:
        raise Refused(f"{values.where}: {name} {size} is no multiple of {of} {part}; {CURE}")


def _softmax_attention(values: ConfigValues, model_type: str, window: int | None) -> Attention:
    heads = values.size("num_attention_heads")
    if (kv_rank := values.optional_size("kv_lora_rank")) is not None:
        return LatentAttention(
            heads=heads,
            query_rank=values.optional_size("q_lora_rank"),
            kv_rank=kv_rank,
            nope_dim=values.size("qk_nope_head_dim"),
            rope_dim=values.size("qk_rope_head_dim"),
            value_dim=values.size("v_head_dim"),
            gated=values.flag("mla_use_output_gate"),
            window=window,
        )
    head_dim = values.optional_size("head_dim")
    if head_dim is None:
        if values.size("hidden_size") % heads:
            raise Refused(
                f"{values.where}: hidden_size {values.size('hidden_size')} does not divide by "
                f"{heads} heads, and there is no head_dim"
            )
        head_dim = values.size("hidden_size") // heads
    bias = values.flag("attention_bias")
    kv_heads = values.optional_size("num_key_value_heads") or heads
    _check_multiple(values, "num_attention_heads", heads, "num_key_value_heads", kv_heads)
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        qkv_bias=bias or values.flag("qkv_bias", model_type in _QUERY_BIAS),
        output_bias=bias and model_type in _OUTPUT_BIAS,
        head_norms=model_type.startswith(_HEAD_NORMS),
        whole_norms=model_type in _WHOLE_NORMS,
        gated=values.flag("attn_output_gate", model_type == "qwen3_next"),
        sinks=model_type == "gpt_oss",
    )


def feed_forward(values: ConfigValues, model_type: str, index: int) -> FeedForward:
    experts = values.size_or_none("num_experts", "n_routed_experts", "num_local_experts")
    if experts is None or not _is_sparse(values, index):
        return DenseBlock(values.size("intermediate_size"), bias=values.flag("mlp_bias"))
    width = values.size("moe_intermediate_size", "intermediate_size", listed=True)
    kimi = model_type in ("kimi_k3", "kimi_linear")
    shared = values.size_or_none("n_shared_experts", "num_shared_experts", "num_shared_expert")
    shared_width = values.size_or_none("shared_expert_intermediate_size")
    return ExpertBlock(
        experts=experts,
        width=width,
        name="block_sparse_moe" if kimi or model_type == "mixtral" else "mlp",
        projections=("w1", "w3", "w2")
        if kimi or model_type == "mixtral"
        else ("gate_proj", "up_proj", "down_proj"),
        latent=values.optional_size("routed_expert_hidden_size"),
        latent_norm=values.flag("latent_moe_use_norm"),
        shared_width=shared * width if shared else shared_width or 0,
        shared_name="shared_experts" if shared else "shared_expert",
        shared_gate=shared_width is not None,
        correction=kimi or values.text("topk_method") == "noaux_tc",
        bias=model_type == "gpt_oss",
        # KimiMoE, min_moe_intermediate_per_partition.
        narrowest=values.size_or("min_moe_intermediate_per_partition", 256) if kimi else 0,
    )


def _is_sparse(values: ConfigValues, index: int) -> bool:
    """Whether a layer has experts. ``moe_layer_freq`` is a period, or a 0 or 1 for every layer."""
    if values.is_list("moe_layer_freq"):
        listed = values.integers("moe_layer_freq") or ()
        if index >= len(listed):
            raise values.wrong("moe_layer_freq", "a 0 or 1 for every layer")
        chosen = bool(listed[index])
    else:
        chosen = index % values.size_or("moe_layer_freq", 1) == 0
    return (
        chosen
        and index >= (values.integer("first_k_dense_replace") or 0)
        and (index + 1) % values.size_or("decoder_sparse_step", 1) == 0
        and index not in (values.integers("mlp_only_layers") or ())
    )
