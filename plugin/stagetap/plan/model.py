"""A model's configuration as a list of decoder layers, whose shapes can be told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagetap.errors import Refused
from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.plan.attention import (
    Attention,
    GatedDeltaNet,
    GroupedAttention,
    KimiDeltaAttention,
    LatentAttention,
)
from stagetap.plan.dims import Dims
from stagetap.plan.feed_forward import DenseBlock, ExpertBlock, FeedForward
from stagetap.plan.parallel import Parallel
from stagetap.plan.quantization import Quantization, read_quantization
from stagetap.plan.weights import Weight, replicated, vector

CHECKED_TYPES = frozenset(
    {
        "deepseek_v3",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "granite",
        "kimi_k3",
        "kimi_linear",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "qwen3_next",
    }
)
"""Model types whose layers were read in vLLM's sources; others are read by the same keys."""

UNTOLD = {
    "compress_ratios": "compressed attention",
    "index_topk": "an indexer for sparse attention",
    "mamba_d_state": "Mamba layers",
    "mamba_num_heads": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "state_size": "Mamba layers",
    "hidden_size_per_layer_input": "embeddings of each layer",
    "num_kv_shared_layers": "layers that share a KV cache",
    "global_head_dim": "heads of two sizes",
    "per_layer_config": "sizes that differ by layer",
    "use_double_wide_mlp": "blocks of two widths",
    "is_encoder_decoder": "an encoder",
}
"""Keys that, set, mean shapes which the plan cannot tell, and what they stand for."""

_ENDS = frozenset({"embedding", "head", "norm"})
_ENDS_EVERYWHERE = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"), _ENDS
    ),
    "qwen3_next": frozenset({"embedding", "head"}),
}
"""What vLLM 0.32.0 allocates on every stage for these models, and not on the one that uses it."""

_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe_lite"}
_HEAD_NORMS = ("qwen3", "gemma3")
_QUERY_BIAS = {"qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text"}
_OUTPUT_BIAS = {"llama", "granite", "gpt_oss"}
_ALL_WINDOWED = {"mistral", "mixtral", "phi3"}


@dataclass(frozen=True)
class DecoderLayer:
    """One decoder layer.

    Attributes:
        norms: of the layer itself, each as wide as the model.
        residual_gates: vectors as wide as the model beside them (attention residuals).
    """

    attention: Attention
    feed_forward: FeedForward
    norms: int = 2
    residual_gates: int = 0

    def weights(self, index: int, hidden: int, parallel: Parallel) -> list[Weight]:
        """Its weights on one rank."""
        prefix = f"model.layers.{index}"
        found = self.attention.weights(f"{prefix}.self_attn", hidden, parallel)
        found += self.feed_forward.weights(prefix, hidden, parallel)
        found += [vector(f"{prefix}.norm{number}", hidden) for number in range(self.norms)]
        found += [
            replicated(f"{prefix}.residual_gate{number}", 1, hidden, linear=False)
            for number in range(self.residual_gates)
        ]
        return found


@dataclass(frozen=True)
class Model:
    """A target, as far as its ``config.json`` tells.

    Attributes:
        model_type: of the decoder.
        hidden_size: H.
        vocab_size: as the checkpoint has it, not padded.
        tied: the output head is the embedding.
        dtype: of weights that are not quantized, and of taps.
        max_len: longest sequence in tokens, None where position scaling makes it vLLM's to derive.
        layers: the N decoder layers.
        end_vectors: vectors as wide as the model behind the last layer.
        ends_everywhere: which of embedding, head and norm every stage holds.
        quantization: of the weights.
        remarks: what the plan had to estimate or leave out.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    tied: bool
    dtype: str
    max_len: int | None
    layers: tuple[DecoderLayer, ...]
    end_vectors: int
    ends_everywhere: frozenset[str]
    quantization: Quantization
    remarks: tuple[str, ...]

    @property
    def num_hidden_layers(self) -> int:
        """N."""
        return len(self.layers)

    @property
    def itemsize(self) -> int:
        """Bytes per element of :attr:`dtype`."""
        return DTYPE_ITEMSIZE[self.dtype]

    def embedding(self, name: str, parallel: Parallel) -> Weight:
        """Embedding or output head on one rank."""
        return Weight(
            name,
            "sharded",
            parallel.vocabulary(self.vocab_size),
            self.hidden_size,
            self.vocab_size * self.hidden_size,
            linear=False,
        )

    def outer_weights(self, first: bool, last: bool, parallel: Parallel) -> list[Weight]:
        """What a stage holds beside its decoder layers: embedding, output head, final norm."""
        held = self.ends_everywhere
        found: list[Weight] = []
        if first or (last and self.tied) or "embedding" in held:
            found.append(self.embedding("model.embed_tokens", parallel))
        if (last or "head" in held) and not self.tied:
            found.append(self.embedding("lm_head", parallel))
        if last or "norm" in held:
            found += [vector(f"model.norm{n}", self.hidden_size) for n in range(self.end_vectors)]
        return found

    def parameters(self) -> int:
        """Elements of all weights of the decoder, embedding and head: the model's size."""
        alone = Parallel(pp=1, tp=1)
        weights = self.outer_weights(True, True, alone)
        for index, layer in enumerate(self.layers):
            weights += layer.weights(index, self.hidden_size, alone)
        return sum(weight.elements for weight in weights)


def read_model(
    config: Mapping[str, Any], where: str = "config.json", dtype: str | None = None
) -> Model:
    """Read a configuration.

    Args:
        config: what ``config.json`` holds.
        where: what to call it in a message.
        dtype: as vLLM's ``--dtype``; None and ``auto`` are the checkpoint's.

    Raises:
        Refused: a size is missing, or the model has parts whose shapes the plan cannot tell.
    """
    text = config.get("text_config") or config
    if not isinstance(text, Mapping):
        raise Refused(f"{where}: text_config is no object; give a config.json as released")
    dims = Dims(text, where)
    model_type = str(dims.get("model_type", config.get("model_type", "")))
    for key, what in UNTOLD.items():
        if dims.get(key):
            raise Refused(
                f"{where}: {key} means {what}, whose shapes the plan does not know yet; run "
                "`stagetap doctor` on the machine that shall serve it"
            )
    remarks = []
    if model_type not in CHECKED_TYPES:
        remarks.append(
            f"model type {model_type or 'unnamed'!r} was read by the keys that other models use"
        )
    if config.get("vision_config") or config.get("audio_config"):
        remarks.append("towers for images or sound are not counted")
    if dims.get("num_nextn_predict_layers"):
        remarks.append("layers that predict further tokens (MTP) are not counted; vLLM loads none")
    total = dims.size("num_hidden_layers")
    quantization = read_quantization(
        dims.get("quantization_config", config.get("quantization_config"))
    )
    attention = _attentions(dims, model_type, total, remarks)
    residuals = dims.get("attn_res_block_size") is not None
    layers = tuple(
        DecoderLayer(
            attention[index],
            _feed_forward(dims, model_type, index),
            norms=(4 if model_type in _FOUR_NORMS else 2) + 2 * residuals,
            residual_gates=2 * residuals,
        )
        for index in range(total)
    )
    return Model(
        model_type=model_type,
        hidden_size=dims.size("hidden_size"),
        vocab_size=dims.size("vocab_size"),
        tied=bool(dims.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        dtype=_dtype(dims, config, dtype, remarks),
        max_len=dims.optional_size("max_position_embeddings", "model_max_length"),
        layers=layers,
        end_vectors=3 if residuals else 1,
        ends_everywhere=_ENDS_EVERYWHERE.get(model_type, frozenset()),
        quantization=quantization,
        remarks=tuple(remarks),
    )


def _dtype(dims: Dims, config: Mapping[str, Any], asked: str | None, remarks: list[str]) -> str:
    said = asked if asked not in (None, "auto") else None
    found = said or next(
        (
            source
            for key in ("dtype", "torch_dtype")
            for source in (dims.get(key), config.get(key))
            if isinstance(source, str)
        ),
        None,
    )
    if said is None and found in (None, "float32"):
        remarks.append(f"dtype {found or 'unsaid'}: vLLM's auto makes it bfloat16")
        return "bfloat16"
    if found not in DTYPE_ITEMSIZE:
        raise Refused(
            f"dtype {found!r} is none that taps are stored in; use one of "
            f"{', '.join(DTYPE_ITEMSIZE)}"
        )
    return str(found)


def _attentions(dims: Dims, model_type: str, total: int, remarks: list[str]) -> list[Attention]:
    kinds = _layer_kinds(dims, model_type, total, remarks)
    linear = _linear_attention(dims) if "linear" in kinds else None
    if "linear" in kinds and linear is None:
        raise Refused(
            "config.json has linear-attention layers of an unknown kind; known are KDA "
            "(linear_attn_config) and gated delta nets (linear_num_value_heads)"
        )
    full = _softmax_attention(dims, model_type, None)
    window = dims.optional_size("sliding_window")
    found: list[Attention] = []
    for kind in kinds:
        if kind == "linear":
            assert linear is not None
            found.append(linear)
        elif kind == "sliding":
            if window is None:
                raise Refused("config.json has sliding-attention layers and no sliding_window")
            found.append(_softmax_attention(dims, model_type, window))
        else:
            found.append(full)
    return found


def _layer_kinds(dims: Dims, model_type: str, total: int, remarks: list[str]) -> list[str]:
    """``full``, ``sliding`` or ``linear`` for every layer."""
    kda = dims.section("linear_attn_config")
    if kda is not None and kda.get("kda_layers"):
        numbered = set(kda.get("kda_layers"))  # counted from 1
        return ["linear" if index + 1 in numbered else "full" for index in range(total)]
    if (types := dims.get("layer_types")) is not None:
        known = {
            "full_attention": "full",
            "sliding_attention": "sliding",
            "linear_attention": "linear",
        }
        if unknown := sorted(set(types) - set(known)):
            raise Refused(
                f"layer_types: the plan does not know {unknown[0]!r}; known are {', '.join(known)}"
            )
        if len(types) < total:
            raise Refused(f"layer_types names {len(types)} layers of {total}")
        return [known[name] for name in types[:total]]
    if dims.optional_size("linear_num_value_heads"):
        every = dims.get("full_attention_interval", 4)
        return ["full" if (index + 1) % every == 0 else "linear" for index in range(total)]
    if dims.optional_size("sliding_window") is None or not dims.get("use_sliding_window", True):
        return ["full"] * total
    if model_type in _ALL_WINDOWED:
        return ["sliding"] * total
    every = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": dims.get("sliding_window_pattern", 6)}.get(
        model_type
    )
    if every is None:
        remarks.append("sliding_window without layer_types: counted as full attention")
        return ["full"] * total
    return ["full" if (index + 1) % every == 0 else "sliding" for index in range(total)]


def _linear_attention(dims: Dims) -> Attention | None:
    if (kda := dims.section("linear_attn_config")) is not None:
        return KimiDeltaAttention(
            heads=kda.size("num_heads"),
            head_dim=kda.size("head_dim"),
            conv=kda.size("short_conv_kernel_size"),
            full_rank_gate=kda.flag("use_full_rank_gate"),
        )
    if dims.optional_size("linear_num_value_heads") is None:
        return None
    state = dims.get("mamba_ssm_dtype")
    return GatedDeltaNet(
        key_heads=dims.size("linear_num_key_heads"),
        value_heads=dims.size("linear_num_value_heads"),
        key_dim=dims.size("linear_key_head_dim"),
        value_dim=dims.size("linear_value_head_dim"),
        conv=dims.size("linear_conv_kernel_dim"),
        state_itemsize=DTYPE_ITEMSIZE.get(state) if isinstance(state, str) else None,
    )


def _softmax_attention(dims: Dims, model_type: str, window: int | None) -> Attention:
    heads = dims.size("num_attention_heads")
    if (kv_rank := dims.optional_size("kv_lora_rank")) is not None:
        return LatentAttention(
            heads=heads,
            query_rank=dims.optional_size("q_lora_rank"),
            kv_rank=kv_rank,
            nope_dim=dims.size("qk_nope_head_dim"),
            rope_dim=dims.size("qk_rope_head_dim"),
            value_dim=dims.size("v_head_dim"),
            gated=dims.flag("mla_use_output_gate"),
            window=window,
        )
    head_dim = dims.optional_size("head_dim")
    if head_dim is None:
        if dims.size("hidden_size") % heads:
            raise Refused(
                f"hidden_size {dims.size('hidden_size')} does not divide by {heads} heads, and "
                "config.json says no head_dim"
            )
        head_dim = dims.size("hidden_size") // heads
    bias = dims.flag("attention_bias")
    return GroupedAttention(
        heads=heads,
        kv_heads=dims.optional_size("num_key_value_heads") or heads,
        head_dim=head_dim,
        window=window,
        qkv_bias=bias or dims.flag("qkv_bias", model_type in _QUERY_BIAS),
        output_bias=bias and model_type in _OUTPUT_BIAS,
        head_norms=model_type.startswith(_HEAD_NORMS),
        gated=dims.flag("attn_output_gate", model_type == "qwen3_next"),
        sinks=model_type == "gpt_oss",
    )


def _feed_forward(dims: Dims, model_type: str, index: int) -> FeedForward:
    experts = dims.optional_size("num_experts", "n_routed_experts", "num_local_experts")
    if experts is None or not _is_sparse(dims, index):
        return DenseBlock(dims.size("intermediate_size"), bias=dims.flag("mlp_bias"))
    width = dims.size("moe_intermediate_size", "intermediate_size")
    kimi = model_type in ("kimi_k3", "kimi_linear")
    shared = dims.optional_size("n_shared_experts", "num_shared_experts")
    shared_width = dims.optional_size("shared_expert_intermediate_size")
    return ExpertBlock(
        experts=experts,
        width=width,
        name="block_sparse_moe" if kimi or model_type == "mixtral" else "mlp",
        projections=("w1", "w3", "w2")
        if kimi or model_type == "mixtral"
        else ("gate_proj", "up_proj", "down_proj"),
        latent=dims.optional_size("routed_expert_hidden_size"),
        latent_norm=dims.flag("latent_moe_use_norm"),
        shared_width=shared * width if shared else shared_width or 0,
        shared_name="shared_experts" if shared else "shared_expert",
        shared_gate=shared_width is not None,
        correction=kimi or dims.get("topk_method") == "noaux_tc",
        bias=model_type == "gpt_oss",
        # KimiMoE, min_moe_intermediate_per_partition.
        narrowest=dims.get("min_moe_intermediate_per_partition", 256) if kimi else 0,
    )


def _is_sparse(dims: Dims, index: int) -> bool:
    return (
        index >= dims.get("first_k_dense_replace", 0)
        and index % dims.get("moe_layer_freq", 1) == 0
        and (index + 1) % dims.get("decoder_sparse_step", 1) == 0
        and index not in dims.get("mlp_only_layers", ())
    )
