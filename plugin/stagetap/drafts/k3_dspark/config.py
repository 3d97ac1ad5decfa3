"""The config.json of a K3 DSpark draft, as it is published and as vLLM reads it."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, DeepseekV3Config

from stagetap.taps import stream_of_k3_draft

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

    Raises:
        ValueError: something that is not built, named.
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

    def __post_init__(self, **kwargs: Any) -> None:
        self.rope_parameters = rope_parameters(
            self.rope_parameters, kwargs.pop("rope_scaling", None), kwargs.pop("rope_theta", None)
        )
        if self.target_layer_ids is not None and self.num_target_layers is None:
            self.num_target_layers = len(self.target_layer_ids)
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        _refuse_what_is_not_built(self)

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


def _refuse_what_is_not_built(config: K3DSparkConfig) -> None:
    wrong = {
        "mla_use_nope=true": config.mla_use_nope,
        "mla_use_output_gate=true": config.mla_use_output_gate,
        "mla_use_qk_norm=true": config.mla_use_qk_norm,
        "dspark_bonus_anchor=true": config.dspark_bonus_anchor,
        "sample_from_anchor=false": not getattr(config, "sample_from_anchor", True),
        "q_lora_rank=null": config.q_lora_rank is None,
        "attention_bias=true": config.attention_bias,
        "attention_dropout above 0": config.attention_dropout,
        "n_routed_experts above 0": config.n_routed_experts,
        f"hidden_act={config.hidden_act!r}": config.hidden_act != "silu",
        "rope_interleave=false": not config.rope_interleave,
        "logit_scale other than 1": config.logit_scale != 1.0,
        "layer_types": getattr(config, "layer_types", None),
        "sliding_window": getattr(config, "sliding_window", None),
        f"markov_head_type={config.markov_head_type!r}": config.markov_head_type != "vanilla",
        "markov_rank below 1": config.markov_rank is not None and config.markov_rank < 1,
        "block_size below 1": config.block_size is not None and config.block_size < 1,
        "mask_token_id outside of the vocabulary": config.mask_token_id is not None
        and not 0 <= config.mask_token_id < config.vocab_size,
        "draft_vocab_size other than vocab_size": config.draft_vocab_size != config.vocab_size,
        "target_hidden_size other than hidden_size": config.target_hidden_size
        != config.hidden_size,
    }
    named = [name for name, is_so in wrong.items() if is_so]
    if named:
        raise ValueError(f"a K3 DSpark draft is not built with {', '.join(named)}")
    ids = config.target_layer_ids
    if ids is None:
        return
    if not ids or any(type(i) is not int or i < 0 for i in ids):
        raise ValueError(f"target_layer_ids must be layers counted from 0, not {ids!r}")
    if len(set(ids)) != len(ids) or config.num_target_layers != len(ids):
        raise ValueError(
            f"target_layer_ids {ids!r} must be distinct, and num_target_layers "
            f"({config.num_target_layers}) their number"
        )


AutoConfig.register(MODEL_TYPE, K3DSparkConfig, exist_ok=True)
