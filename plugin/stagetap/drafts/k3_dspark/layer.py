"""One layer of a K3 DSpark draft."""

from __future__ import annotations

from speculators.models.dflash.model_definitions import Qwen3DFlashDecoderLayer
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from .attention import K3DSparkMLAAttention
from .config import K3DSparkConfig


class K3DSparkDecoderLayer(Qwen3DFlashDecoderLayer):
    """speculators' DFlash layer, its forward pass unchanged, with MLA for its attention."""

    def __init__(self, config: K3DSparkConfig, layer_idx: int) -> None:
        # Past the parent's own, which would make an attention of another shape first.
        super(Qwen3DFlashDecoderLayer, self).__init__()
        self.hidden_size = config.hidden_size
        self.self_attn: nn.Module = K3DSparkMLAAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
