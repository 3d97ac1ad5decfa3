"""What speculators wants to know about a K3 DSpark draft, made from its config.json."""

from __future__ import annotations

import os
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from speculators import SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.config import reload_schemas
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import PretrainedConfig

from .config import MODEL_TYPE, K3DSparkConfig


@SpeculatorModelConfig.register(MODEL_TYPE)
class K3DSparkSpeculatorConfig(DSparkSpeculatorConfig):
    """speculators' view of a :class:`K3DSparkConfig`, which is the only form on disk.

    It is read from, and written as, the draft's own config.json: a checkpoint of the trainer is one
    that vLLM loads, and the published draft is one that the trainer goes on with. Which target the
    draft belongs to is not in that file; speculators' command line names it.
    """

    # With anything else transformers copies these modules into every checkpoint.
    _auto_class: ClassVar[str | None] = None

    speculators_model_type: Literal["k3_dspark"] = MODEL_TYPE  # type: ignore[assignment]
    architectures: list[str] = Field(default_factory=lambda: ["K3DSparkModel"])
    transformer_layer_config: PretrainedConfig = Field(default_factory=K3DSparkConfig)

    @classmethod
    def of_draft(
        cls, draft: K3DSparkConfig, verifier: VerifierConfig | None = None
    ) -> K3DSparkSpeculatorConfig:
        """The view of one draft. Raises ValueError when it leaves something open."""
        draft.check_complete()
        return cls(
            transformer_layer_config=draft,
            draft_vocab_size=draft.vocab_size,
            block_size=draft.block_size,
            aux_hidden_state_layer_ids=draft.tap_ids,
            mask_token_id=draft.mask_token_id,
            sample_from_anchor=True,
            markov_rank=draft.markov_rank,
            markov_head_type="vanilla",
            enable_confidence_head=draft.enable_confidence_head,
            confidence_head_with_markov=draft.confidence_head_with_markov,
            speculators_config=SpeculatorsConfig(
                algorithm="dspark",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft.block_size)],
                default_proposal_method="greedy",
                verifier=verifier or VerifierConfig(name_or_path=None, architectures=[]),
            ),
        )

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> K3DSparkSpeculatorConfig:
        """Read a draft's config.json."""
        return cls.of_draft(K3DSparkConfig.from_pretrained(pretrained_model_name_or_path, **kwargs))

    def to_diff_dict(self) -> dict[str, Any]:
        """The draft's config.json."""
        document: dict[str, Any] = self.transformer_layer_config.to_diff_dict()
        dtype = self.dtype
        return document | {
            "architectures": ["K3DSparkModel"],
            "dtype": str(dtype).removeprefix("torch.") if dtype is not None else None,
        }


# Annotations that the base classes import only for type checkers have to be resolved once more.
K3DSparkSpeculatorConfig.model_rebuild(force=True, _types_namespace={"torch": torch})
reload_schemas()
