"""What may stand in a K3 draft's config.json, field by field: types, ranges, and what is built.

A field that is not named here is neither trained nor read by vLLM's class of this draft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from stagetap.config_values import MAX_LAYERS, MAX_SIZE
from stagetap.wording import shown

# bfloat16 and float16 for training, float32 to be exact, float64 for numeric gradients.
_DTYPES = ("bfloat16", "float16", "float32", "float64")


def _off(value: bool) -> bool:
    if value:
        raise PydanticCustomError("not_built", "only false is built")
    return value


def _on(value: bool) -> bool:
    if not value:
        raise PydanticCustomError("not_built", "only true is built")
    return value


def _absent(value: Any) -> Any:
    if value is not None:
        raise PydanticCustomError("not_built", "it is not built, leave it out")
    return value


def _with_a_point(value: Any) -> Any:
    if isinstance(value, int):
        raise PydanticCustomError("integer", "input should be written with a point, as in 1e-6")
    return value


def _dtype(value: Any) -> Any:
    """A name as config.json has it, or the torch.dtype that transformers makes of one."""
    name = value if isinstance(value, str) else str(value).removeprefix("torch.")
    if name not in _DTYPES:
        raise PydanticCustomError("dtype", f"input should be one of {', '.join(_DTYPES)}")
    return value


Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Index = Annotated[int, Field(ge=0, le=MAX_SIZE)]
Zero = Annotated[int, Field(ge=0, le=0)]
Off = Annotated[bool, AfterValidator(_off)]
On = Annotated[bool, AfterValidator(_on)]
Absent = Annotated[Any, AfterValidator(_absent)]
Dtype = Annotated[Any, AfterValidator(_dtype)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Float = BeforeValidator(_with_a_point)
"""Of transformers' own fields, which take no integer for a float."""
Base = Annotated[float, Field(gt=1, allow_inf_nan=False)]
"""YaRN divides by its logarithm."""


class RopeFields(TypedDict, total=False):
    """``rope_parameters``, in the one spelling that is written.

    Zeros are refused where transformers takes them for nothing and vLLM for a number.
    """

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    rope_type: str
    rope_theta: Base
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    original_max_position_embeddings: Size
    beta_fast: Positive
    beta_slow: Positive
    mscale: Positive
    mscale_all_dim: Positive


class DFlashFields(TypedDict, total=False):
    """``dflash_config``: keys of another draft, which vLLM reads before the draft's own."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    mask_token_id: Index
    causal: Off | None
    use_swa: Off
    sample_from_anchor: Off


class Fields(TypedDict, total=False):
    """The whole of it. Fields that depend on each other are held together by the configuration."""

    __pydantic_config__ = ConfigDict(strict=True)  # type: ignore[misc]

    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)]
    num_attention_heads: Size
    num_key_value_heads: Size | None
    q_lora_rank: Size
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Annotated[int, Field(ge=2, le=MAX_SIZE, multiple_of=2)]  # turned in pairs
    v_head_dim: Size
    head_dim: Size | None
    qk_head_dim: Size
    max_position_embeddings: Size
    rms_norm_eps: Annotated[Positive, Float]
    initializer_range: Annotated[Positive, Float]
    dtype: Dtype | None
    torch_dtype: Dtype | None
    architectures: list[str] | None

    target_layer_ids: Annotated[list[Index], Field(min_length=1)] | None
    num_target_layers: Size | None
    target_hidden_size: Size | None
    draft_vocab_size: Size | None
    block_size: Size | None
    mask_token_id: Index | None
    markov_rank: Size | None
    markov_head_type: Literal["vanilla"]
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    fc_norm: bool

    rope_parameters: dict[str, Any] | None
    rope_scaling: dict[str, Any] | None
    rope_theta: Base | None
    rope_interleave: On
    partial_rotary_factor: Absent
    original_max_position_embeddings: Absent

    mla_use_nope: Off
    mla_use_output_gate: Off
    mla_use_qk_norm: Off
    dspark_bonus_anchor: Off
    sample_from_anchor: On
    is_causal: Off | None
    attention_bias: Off
    attention_dropout: Annotated[float, Field(ge=0, le=0)] | None
    hidden_act: Literal["silu"]
    logit_scale: Annotated[float, Field(ge=1, le=1)]
    n_routed_experts: Zero
    num_local_experts: Zero  # transformers' other name of the same
    n_shared_experts: Index
    num_experts_per_tok: Index | None
    tie_word_embeddings: bool
    layer_types: Absent
    sliding_window: Absent
    per_layer_config: Absent
    quantization_config: Absent

    dflash_config: DFlashFields | None
    eagle_config: dict[str, Any] | None


_FIELDS = TypeAdapter(Fields)
_ROPE_FIELDS = TypeAdapter(RopeFields)


def check_fields(values: Mapping[str, Any]) -> None:
    """Raises ValueError, in one line, for a value of config.json that no draft can have."""
    _check(_FIELDS, values, "")


def check_rope_fields(values: Mapping[str, Any]) -> None:
    """The same for one dictionary of rotary parameters."""
    _check(_ROPE_FIELDS, values, "rope_parameters.")


def _check(adapter: TypeAdapter[Any], values: Mapping[str, Any], prefix: str) -> None:
    try:
        adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = prefix + ".".join(map(str, first["loc"]))
        said = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"a K3 draft's {name} is {shown(first['input'])}: {said}") from None
