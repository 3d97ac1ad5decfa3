"""The DSpark draft of Kimi-K3: dense MLA layers over the target's taps, as it is published.

Written here is what speculators 0.9.0 lacks: the configuration, the attention and the names of the
tensors. Losses, masks, anchors, Markov and confidence head and the trainer are speculators' own.
"""

from .attention import K3DSparkMLAAttention
from .config import K3DSparkConfig
from .layer import K3DSparkDecoderLayer
from .model import K3DSparkModel
from .speculator import K3DSparkSpeculatorConfig

__all__ = [
    "K3DSparkConfig",
    "K3DSparkDecoderLayer",
    "K3DSparkMLAAttention",
    "K3DSparkModel",
    "K3DSparkSpeculatorConfig",
]
