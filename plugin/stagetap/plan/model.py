"""A target: its decoder layers, and what surrounds them."""

from __future__ import annotations

from dataclasses import dataclass

from stagetap.manifest import DTYPE_ITEMSIZE
from stagetap.plan.attention import Attention
from stagetap.plan.feed_forward import FeedForward
from stagetap.plan.parallel import Parallel
from stagetap.plan.quantization import Quantization
from stagetap.plan.weights import Weight, replicated, vector
from stagetap.taps import STREAM_MIXTURE, STREAM_PREFIX_SUM, STREAM_RESIDUAL


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
