"""Which decoders StageTap captures from in this version, and where their layers are.

The capture rests on one property: a decoder layer returns ``(hidden_states, residual)`` whose sum
is the residual stream, and takes ``(positions, hidden_states, residual)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagetap.errors import Refused

if TYPE_CHECKING:
    from torch import nn

CAPTURED_LAYERS = frozenset(
    {
        "vllm.model_executor.models.llama.LlamaDecoderLayer",
        "vllm.model_executor.models.qwen2.Qwen2DecoderLayer",
        "vllm.model_executor.models.qwen3.Qwen3DecoderLayer",
    }
)
CAPTURED_ARCHITECTURES = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


def check_architecture(architecture: str) -> None:
    """Refuse, from the configuration alone, a model that cannot be captured yet.

    Raises:
        Refused: naming the architecture and those that work.
    """
    if architecture not in CAPTURED_ARCHITECTURES:
        raise Refused(
            f"{architecture} cannot be captured in this version; captured are "
            f"{', '.join(sorted(CAPTURED_ARCHITECTURES))}"
        )


def inner_decoder(model: nn.Module) -> nn.Module:
    """The module of a loaded model that holds ``layers``, ``start_layer`` and ``end_layer``.

    Raises:
        Refused: the layers of this stage are none that StageTap can capture from.
    """
    decoder = getattr(model, "model", None)
    start, end = getattr(decoder, "start_layer", None), getattr(decoder, "end_layer", None)
    if decoder is None or start is None or end is None:
        raise Refused(f"{type(model).__name__} has no decoder that StageTap can capture from yet")
    for layer in decoder.layers[start:end]:
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        if name not in CAPTURED_LAYERS:
            raise Refused(
                f"{type(model).__name__} has decoder layers of {name}, which cannot be captured "
                "in this version"
            )
    return decoder
