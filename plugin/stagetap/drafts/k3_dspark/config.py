"""The config.json of a K3 DSpark draft, as it is published and as vLLM reads it."""

from __future__ import annotations

from typing import Any, Self

from transformers import AutoConfig, DeepseekV3Config

from stagetap.layer_choice import draft_layer_ids
from stagetap.taps import stream_of_k3_draft

from .fields import check_fields
from .rope import ROPE_THETA, rope_parameters

MODEL_TYPE = "k3_dspark"


class K3DSparkConfig(DeepseekV3Config):
    """One flat configuration: dense MLA layers, what they read of the target, and the heads.

    A field that config.json leaves out has the default that it has in vLLM's class of the same
    name (``vllm/transformers_utils/configs/k3_dspark.py``), so that both read one file alike.

    Attributes:
        target_layer_ids: decoder layers of the target whose output is read, counted from 0: **one
            less** than the tap ids of vLLM and StageTap. In the order of ``context_proj``'s input.
        num_target_layers: how many they are.
        target_hidden_size: width of the target's stream, which must be the draft's own.
        draft_vocab_size: must be ``vocab_size``: the draft shares embedding and head of its target.
        block_size: tokens drafted at once, the first of them from the anchor's own position.
        mask_token_id: the token at the other positions.
        markov_rank: rank of the head that biases a token by the one before it.
        fc_norm: whether each tap is normed by itself before ``context_proj``, for taps of the
            attention residuals' mixture. vLLM 0.32.0 does not load such a draft.

    What is accepted can be saved and read again, and means the same to vLLM.

    Raises:
        ValueError: a value that cannot be (:mod:`.fields`), that is not built, or that contradicts
            another one, named.
    """

    model_type = MODEL_TYPE
    default_theta = ROPE_THETA

    # DeepseekV3Config describes a mixture of experts; these say dense.
    n_routed_experts: int = 0
    n_shared_experts: int = 0
    num_experts_per_tok: int | None = 0

    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    markov_rank: int | None = None
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    fc_norm: bool = False

    mla_use_nope: bool = False
    mla_use_output_gate: bool = False
    mla_use_qk_norm: bool = False
    dspark_bonus_anchor: bool = False
    logit_scale: float = 1.0

    rope_parameters: dict[str, Any] | None = None

    def __new__(cls, **values: Any) -> Self:
        # Before transformers sets anything: it looks at few of the types, and not at ranges.
        check_fields(values)
        return super().__new__(cls)

    def __post_init__(self, **kwargs: Any) -> None:
        self.rope_parameters = rope_parameters(
            self.rope_parameters, kwargs.pop("rope_scaling", None), kwargs.pop("rope_theta", None)
        )
        # A null, which transformers would write over the number in rope_parameters.
        kwargs.pop("original_max_position_embeddings", None)
        # Nothing of a draft is as wide as a file may say here, and vLLM does not read it; but
        # transformers would make the rotary table so wide, and not as qk_rope_head_dim says.
        kwargs.pop("head_dim", None)
        if self.target_layer_ids is not None and self.num_target_layers is None:
            self.num_target_layers = len(self.target_layer_ids)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        _refuse_contradictions(self)

    @property
    def tap_ids(self) -> list[int]:
        """The taps to capture for this draft, in the order in which it reads them."""
        if not self.target_layer_ids:
            raise ValueError(
                "a K3 draft needs target_layer_ids: which layers of the target it reads"
            )
        return [layer + 1 for layer in self.target_layer_ids]

    @property
    def stream(self) -> str:
        """The stream kind whose taps this draft reads."""
        return stream_of_k3_draft(self.fc_norm)

    def check_complete(self) -> None:
        """Raises ValueError naming what a model needs and this configuration leaves open."""
        open_fields = [
            name
            for name in ("target_layer_ids", "block_size", "mask_token_id", "markov_rank")
            if getattr(self, name) is None
        ]
        if open_fields:
            raise ValueError(f"a K3 draft needs {', '.join(open_fields)} in its config.json")
        # Set after the configuration was made: speculators gives a draft its target's vocabulary.
        if self.draft_vocab_size != self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size} and vocab_size {self.vocab_size}: "
                "a K3 draft shares embedding and head of its target, so they must be equal"
            )


def _refuse_contradictions(config: K3DSparkConfig) -> None:
    # Each: the value, what it has to be, and in words.
    equal = {
        "draft_vocab_size": (config.draft_vocab_size, config.vocab_size, "vocab_size"),
        "target_hidden_size": (config.target_hidden_size, config.hidden_size, "hidden_size"),
        "qk_head_dim": (
            config.qk_head_dim,
            config.qk_nope_head_dim + config.qk_rope_head_dim,
            "qk_nope_head_dim and qk_rope_head_dim together",
        ),
    }
    if config.target_layer_ids is not None:
        many = len(config.target_layer_ids)
        equal["num_target_layers"] = (config.num_target_layers, many, "how many target_layer_ids")
    dflash = getattr(config, "dflash_config", None) or {}
    if "mask_token_id" in dflash:  # vLLM's get_parallel_drafting_token_id takes it first
        masks = (dflash["mask_token_id"], config.mask_token_id, "mask_token_id")
        equal["dflash_config.mask_token_id"] = masks
    for name, (value, right, words) in equal.items():
        if value != right:
            raise ValueError(f"a K3 draft's {name} is {value}, and must be {words}, {right}")
    if config.mask_token_id is not None and config.mask_token_id >= config.vocab_size:
        raise ValueError(
            f"a K3 draft's mask_token_id is {config.mask_token_id}, and must be below its "
            f"vocab_size, {config.vocab_size}"
        )
    if config.target_layer_ids is not None:
        # By all keys that vLLM reads, some of which it reads before this one.
        draft_layer_ids(vars(config), "a K3 draft's config.json")


AutoConfig.register(MODEL_TYPE, K3DSparkConfig, exist_ok=True)
