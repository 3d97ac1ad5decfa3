"""A model's configuration as a list of decoder layers, whose shapes can be told."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stagetap.config_values import (
    CURE,
    MAX_LAYERS,
    ConfigValues,
    MissingSize,
    asked_dtype,
    positions_are_scaled,
    said_dtype,
)
from stagetap.errors import Refused
from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.plan.attention import (
    Attention,
    GatedDeltaNet,
    GroupedAttention,
    KimiDeltaAttention,
    LatentAttention,
)
from stagetap.plan.defaults import Completed, completed
from stagetap.plan.feed_forward import DenseBlock, ExpertBlock, FeedForward
from stagetap.plan.parallel import Parallel
from stagetap.plan.quantization import Quantization, read_quantization
from stagetap.plan.weights import Weight, replicated, vector
from stagetap.taps import STREAM_MIXTURE, STREAM_PREFIX_SUM, STREAM_RESIDUAL
from stagetap.wording import shortened, shown

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
    "cross_attention_layers": "layers that attend to images",
    "hybrid_override_pattern": "layers of several kinds",
    "interleave_moe_layer_step": "blocks of two widths among layers with experts",
}
"""Keys that, set, mean shapes which the plan cannot tell, and what they stand for."""

NO_DECODER = {
    "is_encoder_decoder": "an encoder beside its decoder",
    "type_vocab_size": "an encoder, whose tokens are of several segments",
    "classifier_pooling": "an encoder, whose states are pooled",
}
"""Keys that, set, mean a model whose prompts do not run through a decoder alone."""

_PARTS = re.compile(
    r"expert|moe|dense_layer|^share|mlp_layer_types"
    r"|attention_groups|attn_type|attention_type|block_type|layer_pattern"
)
"""Keys that name experts, blocks shared among tokens, or kinds of attention and layers."""

_READ_PARTS = frozenset(
    {
        "attn_type_list",
        "decoder_sparse_step",
        "min_moe_intermediate_per_partition",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts",
        "num_local_experts",
        "num_shared_expert",
        "num_shared_experts",
        "routed_expert_hidden_size",
        "shared_expert_intermediate_size",
        # How many of them a token takes, which changes no shape.
        "moe_k",
        "moe_top_k",
        "moe_topk",
        "num_expert_group",
        "num_experts_per_tok",
        "num_experts_per_token",
    }
)
"""Those of them that the plan reads, or need not."""

_GATED_WITHOUT_SILU = {"gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma"}

_BIASES = ("use_bias", "bias", "use_qkv_bias", "add_bias_linear")
"""Keys of models that were not read, under which their linear layers have biases."""

_ENDS = frozenset({"embedding", "head", "norm"})
_ENDS_EVERYWHERE = {
    **dict.fromkeys(
        ("gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"), _ENDS
    ),
    "qwen3_next": frozenset({"embedding", "head"}),
}
"""What vLLM 0.32.0 allocates on every stage for these models, and not on the one that uses it."""

_DOCTOR_KNOWS = (
    "`stagetap doctor MODEL --pp N`, which needs no more than this file, says whether it can be "
    "captured"
)
_FOUR_NORMS = {"gemma2", "gemma3", "gemma3_text", "glm4", "glm4_moe_lite"}
_ONE_NORM = {"cohere", "cohere2"}
_HEAD_NORMS = ("qwen3", "gemma3")
_WHOLE_NORMS = {"olmo2", "olmoe"}
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
        max_len: longest sequence in tokens; None where the configuration does not tell.
        may_be_longer: vLLM derives a longest sequence of its own from how positions are scaled.
        layers: the N decoder layers.
        end_vectors: vectors as wide as the model behind the last layer.
        attention_residuals: its layers read mixtures, as those of Kimi-K3.
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
    may_be_longer: bool
    layers: tuple[DecoderLayer, ...]
    end_vectors: int
    attention_residuals: bool
    ends_everywhere: frozenset[str]
    quantization: Quantization
    remarks: tuple[str, ...]

    @property
    def streams(self) -> tuple[str, ...]:
        """What its taps can be of."""
        if self.attention_residuals:
            return (STREAM_PREFIX_SUM, STREAM_MIXTURE)
        return (STREAM_RESIDUAL,)

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
    ConfigValues(config, where).texts("architectures")  # for what it refuses
    found = completed(config, where)
    model_type = found.model_type
    _check_kind(found.decoder)
    _check_parts(found.decoder)
    if model_type not in CHECKED_TYPES:
        _check_gate(found.decoder, model_type)
    try:
        return _read(found, dtype)
    except MissingSize as error:
        if model_type in CHECKED_TYPES:
            raise
        raise Refused(
            f"{error.missing}: the plan does not know by which keys model type "
            f"{shown(model_type or 'unnamed')} tells its sizes; {_DOCTOR_KNOWS}"
        ) from None


def _read(found: Completed, dtype: str | None) -> Model:
    outer, values, model_type = found.outer, found.decoder, found.model_type
    remarks: list[str] = []
    if model_type not in CHECKED_TYPES:
        remarks.append(
            f"model type {shown(model_type or 'unnamed')} was read by the keys that other models "
            "use"
        )
        remarks += [
            f"{key}: biases are not counted, weights are a lower bound"
            for key in _BIASES
            if values.has(key)
        ]
    if found.taken:
        sizes = ", ".join(f"{name} {value}" for name, value in found.taken.items())
        remarks.append(f"config.json leaves to its model type's defaults: {sizes}")
    if outer.has("vision_config") or outer.has("audio_config"):
        remarks.append("towers for images or sound are not counted")
    if values.has("num_nextn_predict_layers"):
        remarks.append("layers that predict further tokens (MTP) are not counted; vLLM loads none")
    total = values.size("num_hidden_layers", most=MAX_LAYERS)
    quantization = read_quantization(
        values.section("quantization_config") or outer.section("quantization_config")
    )
    attention = _attentions(values, model_type, total, remarks)
    residuals = values.optional_size("attn_res_block_size") is not None
    layers = tuple(
        DecoderLayer(
            attention[index],
            _feed_forward(values, model_type, index),
            norms=_norms(model_type) + 2 * residuals,
            residual_gates=2 * residuals,
        )
        for index in range(total)
    )
    return Model(
        model_type=model_type,
        hidden_size=values.size("hidden_size"),
        vocab_size=values.size("vocab_size"),
        tied=_tied(outer, values, model_type),
        dtype=_dtype(values, outer, dtype, remarks),
        max_len=values.optional_size("max_position_embeddings", "model_max_length"),
        may_be_longer=positions_are_scaled(values),
        layers=layers,
        end_vectors=3 if residuals else 1,
        attention_residuals=residuals,
        ends_everywhere=_ENDS_EVERYWHERE.get(model_type, frozenset()),
        quantization=quantization,
        remarks=tuple(remarks),
    )


def _norms(model_type: str) -> int:
    """Norms of a decoder layer, those within its attention left out."""
    return 4 if model_type in _FOUR_NORMS else 1 if model_type in _ONE_NORM else 2


def _tied(outer: ConfigValues, values: ConfigValues, model_type: str) -> bool:
    """Whether the head is the embedding. vLLM asks what surrounds a decoder first."""
    for each in (outer, values):
        if each.says("tie_word_embeddings"):
            return each.flag("tie_word_embeddings")
    raise Refused(
        f"{values.where} says no tie_word_embeddings, and the default of model type "
        f"{shown(model_type or 'unnamed')} is not known here; write true or false there, "
        "or install a transformers that knows the type"
    )


def _check_kind(values: ConfigValues) -> None:
    for key, what in NO_DECODER.items():
        if values.has(key):
            raise Refused(f"{values.where}: {key} means {what}; capture takes decoder-only models")
    for key, what in UNTOLD.items():
        if values.has(key):
            raise Refused(
                f"{values.where}: {key} means {what}, whose shapes the plan does not know yet; "
                f"{_DOCTOR_KNOWS}"
            )


def _check_parts(values: ConfigValues) -> None:
    """Refuse experts and kinds of attention whose keys the plan does not read."""
    for key in values.shapes():
        if _PARTS.search(key.lower()) and key not in _READ_PARTS:
            raise Refused(
                f"{values.where}, or the class of its model type: the plan does not know what "
                f"{shortened(key)} means for the shapes of layers; {_DOCTOR_KNOWS}"
            )
    if any(kind != 1 for kind in values.integers("attn_type_list") or ()):
        raise Refused(
            f"{values.where}: attn_type_list means layers without softmax attention, whose shapes "
            f"the plan does not know yet; {_DOCTOR_KNOWS}"
        )


def _check_gate(values: ConfigValues, model_type: str) -> None:
    """Refuse what may be a feed-forward block of two matrices: nearly all of three use SiLU."""
    for key in ("hidden_activation", "hidden_act"):
        activation = values.text(key)
        if activation in (None, "silu", "swish"):
            continue
        if model_type not in _GATED_WITHOUT_SILU:
            raise Refused(
                f"{values.where}: {key} {shown(activation)}: the plan does not know whether the "
                f"feed-forward blocks of {shown(model_type or 'unnamed')} have a gate; "
                f"{_DOCTOR_KNOWS}"
            )


def _dtype(values: ConfigValues, outer: ConfigValues, asked: str | None, remarks: list[str]) -> str:
    said = asked_dtype(asked)
    found = said or said_dtype(values, outer)
    if said is None and found in (None, "float32"):
        remarks.append(f"dtype {found or 'unsaid'}: vLLM's auto makes it bfloat16")
        return "bfloat16"
    if found not in DTYPE_ITEMSIZE:
        raise Refused(
            f"dtype {shown(found)} is none that taps are stored in; use one of "
            f"{', '.join(DTYPE_ITEMSIZE)}"
        )
    return str(found)


def _attentions(
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


def _feed_forward(values: ConfigValues, model_type: str, index: int) -> FeedForward:
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
