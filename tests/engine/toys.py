"""Small decoders in the forms that vLLM's have, with probes of their own: no engine is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from stagetap.engine.capture import hook
from stagetap.engine.capture.cache import TapCache
from stagetap.engine.capture.decoder import Decoder
from stagetap.engine.capture.probe import Probe
from stagetap.engine.capture.self_check import SelfCheck, TapPlan
from stagetap.taps import STREAM_RESIDUAL, StageTaps

WIDTH, TOKENS, VOCABULARY, LAYERS = 8, 6, 64, 4


class ToyLayer(nn.Module):
    """A decoder layer in the form that most models have."""

    def __init__(self, number: int):
        super().__init__()
        self.weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(stream @ self.weight), stream


class ToyDecoder(nn.Module):
    """Runs the layers; `between` may change the stream after one, as a deepstack does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(ToyLayer(number) for number in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, hidden: hidden

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), None
        for number, layer in enumerate(self.layers):
            hidden, residual = layer(None, hidden, residual)
            hidden = self.between(number, hidden)
        return self.norm(hidden + residual)


class ToyModel(nn.Module):
    """A language model around a decoder."""

    def __init__(self, decoder: Callable[[], nn.Module] = ToyDecoder) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = decoder()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids)


@contextmanager
def no_grad_and_context() -> Iterator[None]:
    """What vLLM sets up around a forward pass."""
    from vllm.forward_context import ForwardContext, override_forward_context

    context = ForwardContext(no_compile_layers={}, attn_metadata=None, slot_mapping={})
    with torch.inference_mode(), override_forward_context(context):
        yield


def check_of(model: ToyModel, dtype: torch.dtype = torch.float32) -> SelfCheck:
    """The self-check of a model on its only stage."""

    def forward(count: int) -> None:
        with no_grad_and_context():
            model(input_ids=torch.zeros(count, dtype=torch.int64))

    decoder = Decoder("model.layers", model.model, model.model.layers, 0, LAYERS)
    probe = Probe(
        model,
        decoder,
        width=WIDTH,
        vocabulary=VOCABULARY,
        longest=512,
        forward=forward,
        mixers=[],
        rows=TOKENS,
    )
    return SelfCheck(
        model,
        decoder,
        probe,
        stage=0,
        last=True,
        dtype=dtype,
        share=lambda entry: [entry],
        stream=STREAM_RESIDUAL,
    )


class ToyCache(TapCache):
    """Buffers without vLLM's pages."""

    def __init__(self, layer_ids: Iterable[int], rows: int):
        self.taps = StageTaps(0, LAYERS, tuple(layer_ids))
        self.buffer = torch.zeros(len(self.taps.layer_ids), rows, WIDTH)
        self.counts = torch.zeros(len(self.taps.layer_ids), 2, dtype=torch.int64)
        self._wrong = torch.zeros((), dtype=torch.bool)

    def pages(self) -> Any:
        """None: rows stay in the buffers."""
        return SimpleNamespace(write=lambda slots, rows: None)


def proven(model: ToyModel, layer_ids: Iterable[int], rows: int = 20) -> ToyCache:
    """A model's taps, found, hooked and proven. Raises Refused as an engine's start does."""
    cache = ToyCache(layer_ids, rows)
    check = check_of(model)
    plans = check.choose(cache.taps.layer_ids)
    hook(plans, cache)
    check.prove(plans, cache)
    return cache


def described(plans: list[TapPlan]) -> list[str]:
    """Where taps are read, in words."""
    return [plan.describe() for plan in plans]
