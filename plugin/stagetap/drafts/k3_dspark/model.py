"""The K3 DSpark draft: speculators' DSpark with MLA layers and the published names."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from speculators import SpeculatorModel, VerifierConfig
from speculators.models.dspark import DSparkDraftModel
from speculators.utils.loading import list_checkpoint_keys
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .attention import K3DSparkRotaryEmbedding
from .config import MODEL_TYPE, K3DSparkConfig
from .layer import K3DSparkDecoderLayer
from .speculator import K3DSparkSpeculatorConfig

OF_THE_TARGET = ("lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")
"""Frozen copies that training needs, and that a checkpoint leaves to the target's own."""


@SpeculatorModel.register(MODEL_TYPE)
class K3DSparkModel(DSparkDraftModel):
    """The published draft, to be trained.

    What is saved are the published tensors under their names, with ``embed_tokens``, the target's,
    which stays frozen. With ``fc_norm`` there is one norm more for each tap.
    """

    config_class: ClassVar[type[K3DSparkSpeculatorConfig]] = K3DSparkSpeculatorConfig
    _no_split_modules: ClassVar[list[str]] = ["K3DSparkDecoderLayer"]

    def __init__(self, config: K3DSparkSpeculatorConfig) -> None:
        if not isinstance(config, K3DSparkSpeculatorConfig):
            raise TypeError(
                f"a K3 draft is made of a K3DSparkSpeculatorConfig, not of a "
                f"{type(config).__name__}: give K3DSparkSpeculatorConfig.from_pretrained(FILE), or "
                "of_draft(...) of a K3DSparkConfig"
            )
        super().__init__(config)
        draft = config.transformer_layer_config
        self.rotary_emb = K3DSparkRotaryEmbedding(draft)
        self.fc_norm: nn.ModuleList | None = None
        if draft.fc_norm:
            self.fc_norm = nn.ModuleList(
                Qwen3RMSNorm(draft.hidden_size, eps=draft.rms_norm_eps)
                for _ in draft.target_layer_ids
            )
        for published, inherited in (
            ("context_proj", "fc"),
            ("context_norm", "hidden_norm"),
            ("final_norm", "norm"),
        ):
            self.add_module(published, self._modules.pop(inherited))
        self.__dict__["_keys_to_ignore_on_save"] = list(OF_THE_TARGET)

    # The inherited forward pass asks for these three by the names they had.

    @property
    def fc(self) -> Any:
        return self.combine_taps

    @property
    def hidden_norm(self) -> nn.Module:
        return self.context_norm

    @property
    def norm(self) -> nn.Module:
        return self.final_norm

    def combine_taps(self, taps: Tensor) -> Tensor:
        """Taps side by side ``[B, T, taps * H]`` -> ``[B, T, H]``."""
        if self.fc_norm is not None:
            chunks = taps.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)]
            taps = torch.cat(normed, dim=-1)
        projected: Tensor = self.context_proj(taps)
        return projected

    def _make_decoder_layer(self, config: K3DSparkSpeculatorConfig, layer_idx: int) -> nn.Module:
        return K3DSparkDecoderLayer(config.transformer_layer_config, layer_idx)

    @classmethod
    def from_training_args(
        cls,
        verifier_config: PretrainedConfig,
        t2d: Tensor | None = None,
        d2t: Tensor | None = None,
        **kwargs: Any,
    ) -> K3DSparkModel:
        """A draft with random weights, all of its shape from ``--draft-config``.

        Args:
            verifier_config: what speculators read from ``--draft-config``.
            kwargs: speculators' other arguments. Those that would shape the draft once more are not
                read, but for ``--target-layer-ids``, which has to agree.

        Raises:
            ValueError: no draft configuration, other taps than its own, or a vocabulary of its own.
        """
        if not isinstance(verifier_config, K3DSparkConfig):
            raise ValueError(
                f"a {MODEL_TYPE} draft takes its shape from a config.json: "
                "give --draft-config FILE or --from-pretrained FOLDER"
            )
        name = kwargs["verifier_name_or_path"]
        config = K3DSparkSpeculatorConfig.of_draft(
            verifier_config, VerifierConfig.from_pretrained(name)
        )
        asked = kwargs.get("target_layer_ids")
        if asked is not None and list(asked) != config.aux_hidden_state_layer_ids:
            raise ValueError(
                f"--target-layer-ids says taps {list(asked)}, and the draft's configuration says "
                f"{config.aux_hidden_state_layer_ids} (its target_layer_ids count from 0)"
            )
        if t2d is not None or kwargs["draft_vocab_size"] != verifier_config.vocab_size:
            raise ValueError(
                "a K3 draft shares embedding and head of its target and has no vocabulary of its "
                "own: leave out --draft-vocab-size, --t2d-path and --d2t-path"
            )
        verifier_config._attn_implementation = kwargs["draft_attn_impl"]
        model = cls(config)
        model.load_verifier_weights()
        return model

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str] | None,
        *model_args: Any,
        config: K3DSparkSpeculatorConfig | None = None,
        verifier: str | None = None,
        **kwargs: Any,
    ) -> K3DSparkModel:
        """A draft with the weights of a checkpoint, and its target's.

        Args:
            verifier: folder or name of the target, which a checkpoint does not say.

        Raises:
            ValueError: nothing says which target it is, or a folder's tensors are not this draft's.
        """
        if config is None:
            if pretrained_model_name_or_path is None:
                raise ValueError("say which checkpoint, or give a config")
            config = cls.config_class.from_pretrained(pretrained_model_name_or_path)
        of_target = config.speculators_config.verifier
        of_target.name_or_path = of_target.name_or_path or verifier
        if of_target.name_or_path is None:
            raise ValueError(
                "a K3 draft needs its target's embedding and head: say verifier=FOLDER"
            )
        model: K3DSparkModel = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, config=config, **kwargs
        )
        if pretrained_model_name_or_path and Path(pretrained_model_name_or_path).is_dir():
            model.check_names(list_checkpoint_keys(pretrained_model_name_or_path))
        return model

    def stored_names(self) -> set[str]:
        """The tensors of a checkpoint of this draft."""
        return set(self.state_dict()) - set(OF_THE_TARGET)

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a checkpoint of another draft; transformers would only log the difference.

        Raises:
            ValueError: tensors are missing or left over. ``embed_tokens`` may be missing: it is the
                target's.
        """
        found = set(names)
        missing = sorted(self.stored_names() - found - {"embed_tokens.weight"})
        unknown = sorted(found - self.stored_names())
        if missing or unknown:
            raise ValueError(
                f"not a checkpoint of this draft: missing {missing}, unknown {unknown}; its "
                "config.json must be the one that it was trained with"
            )
