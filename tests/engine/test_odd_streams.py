"""Decoders that carry their stream in ways of their own: refused, or captured as it is read.

Each was accepted once, or could have been, with taps that are no hidden state of any layer.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.models.interfaces import EagleModelMixin

from engine.toys import (
    LAYERS,
    VOCABULARY,
    WIDTH,
    ToyDecoder,
    ToyModel,
    check_of,
    described,
    no_grad_and_context,
    proven,
)
from stagetap.engine.invariant import BrokenInvariant
from stagetap.errors import Refused


def weight(number: int) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(100 + number))


def norm(stream: torch.Tensor) -> torch.Tensor:
    return nn.functional.layer_norm(stream, (WIDTH,))


class Whole(nn.Module):
    """A layer that is given the stream whole and gives it whole."""

    def __init__(self, number: int):
        super().__init__()
        self.weight = weight(number)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states + torch.tanh(hidden_states @ self.weight)


class Carrier(nn.Module):
    """A layer that reads a state beside its hidden states, in whatever way `read` does."""

    def __init__(self, number: int, read: Callable[..., torch.Tensor], wrap: Callable[..., Any]):
        super().__init__()
        self.weight = weight(number)
        self.read, self.wrap = read, wrap

    def forward(self, hidden_states: torch.Tensor, state: Any) -> Any:
        stream = self.read(hidden_states, state)
        return torch.tanh(stream @ self.weight), self.wrap(stream, state)


class CarriedDecoder(ToyDecoder):
    def __init__(self, read: Callable[..., torch.Tensor], wrap: Callable[..., Any]):
        super().__init__()
        self.read, self.wrap = read, wrap
        self.layers = nn.ModuleList(Carrier(number, read, wrap) for number in range(LAYERS))
        self.norm = FinalNorm(read)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        state = self.wrap(hidden / 2 + 0.1, None)
        for layer in self.layers:
            hidden, state = layer(hidden, state)
        return self.norm(hidden, state)


class FinalNorm(nn.Module):
    def __init__(self, read: Callable[..., torch.Tensor]):
        super().__init__()
        self.read = read

    def forward(self, hidden: torch.Tensor, state: Any) -> torch.Tensor:
        return norm(self.read(hidden, state))


def plain(stream: torch.Tensor, _state: Any) -> torch.Tensor:
    return stream


@pytest.mark.parametrize(
    "read",
    [
        lambda hidden, residual: hidden * residual,
        lambda hidden, residual: torch.maximum(hidden, residual),
        lambda hidden, residual: norm(hidden) + norm(residual),
        lambda hidden, residual: hidden + 0.5 * residual,
    ],
    ids=["product", "maximum", "parallel-streams", "weighted"],
)
def test_what_is_not_a_sum_is_refused(read: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(Refused, match=r"tap 2: 2 tensors .* reads two of them, and not as a sum"):
        proven(ToyModel(lambda: CarriedDecoder(read, plain)), [2])


def in_an_attribute() -> CarriedDecoder:
    kept: dict[str, torch.Tensor] = {}

    def read(hidden: torch.Tensor, _state: None) -> torch.Tensor:
        return hidden + kept["stream"]

    def wrap(stream: torch.Tensor, _state: None) -> None:
        kept["stream"] = stream

    return CarriedDecoder(read, wrap)


def two_layers_on() -> CarriedDecoder:
    """Each layer adds what came into the one before the last, as a U-Net does."""

    def read(hidden: torch.Tensor, state: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return hidden + state[0]

    def wrap(stream: torch.Tensor, state: Any) -> tuple[torch.Tensor, ...]:
        return (stream, stream) if state is None else (state[1], stream)

    return CarriedDecoder(read, wrap)


@pytest.mark.parametrize(
    "decoder",
    [
        lambda: CarriedDecoder(lambda hidden, state: hidden + state[0], lambda x, _: [x]),
        lambda: CarriedDecoder(
            lambda hidden, state: hidden + state.view(-1, 2, WIDTH).mean(1),
            lambda x, _: torch.cat([x, -x / 2], -1),
        ),
        in_an_attribute,
        two_layers_on,
    ],
    ids=["list", "wider-tensor", "attribute", "two-layers-on"],
)
@pytest.mark.parametrize("tap", [2, LAYERS])
def test_half_a_stream_is_refused(decoder: Callable[[], nn.Module], tap: int) -> None:
    with pytest.raises(Refused, match=f"tap {tap}: 1 tensors .* reads something else as well"):
        proven(ToyModel(decoder), [tap])


class AddsAgain(Whole):
    def forward(self, hidden_states: torch.Tensor, first: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(hidden_states + first), first


class AddsAgainDecoder(ToyDecoder):
    """Every layer adds the embedding to what it reads, the final norm does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(AddsAgain(number) for number in range(LAYERS))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, first = self.embed(input_ids), self.embed(input_ids) + 0.3
        for layer in self.layers:
            hidden, first = layer(hidden, first)
        return self.norm(hidden)


def test_an_embedding_that_every_layer_adds_is_no_part_of_the_stream() -> None:
    with pytest.raises(Refused, match=r"tap 1: .* that other layers add again"):
        proven(ToyModel(AddsAgainDecoder), [1])


class HeadDecoder(ToyDecoder):
    """Calls something else than its norm after the last layer, with half of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(None, hidden, residual)
        self.head(hidden)
        return self.norm(hidden + residual)


def test_the_last_tap_is_all_that_the_output_is_made_of() -> None:
    with pytest.raises(Refused, match="tap 4: 1 tensors of the right shape go input into head"):
        proven(ToyModel(HeadDecoder), [LAYERS])
    proven(ToyModel(HeadDecoder), [1, 3])


# Right in a probe, and otherwise later -------------------------------------------------------


class WholeDecoder(ToyDecoder):
    """Keeps what each layer was given, and the norm, in `read`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Whole(number) for number in range(LAYERS))
        self.read: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        self.read = [hidden]
        for number, layer in enumerate(self.layers):
            hidden = self.after(number, layer, hidden, input_ids)
            self.read.append(hidden)
        return self.norm(hidden)

    def after(
        self, number: int, layer: nn.Module, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        return layer(hidden)  # type: ignore[no-any-return]


class ImageDecoder(WholeDecoder):
    """Adds to the stream of tokens that no probe has, between two layers."""

    IMAGE = VOCABULARY  # no random id

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY + 1, WIDTH)

    def after(
        self, number: int, layer: nn.Module, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        return layer(hidden) + (input_ids == self.IMAGE)[:, None]  # type: ignore[no-any-return]


def test_a_change_between_two_layers_is_in_the_tap_as_it_is_read() -> None:
    model = ToyModel(ImageDecoder)
    cache = proven(model, range(LAYERS + 1))
    ids = torch.arange(10, 30)
    ids[3:7] = ImageDecoder.IMAGE
    cache.begin_step()
    with no_grad_and_context():
        model(ids)
    for column, stream in enumerate(model.model.read):
        assert torch.equal(cache.buffer[column, : len(ids)], stream), column
    cache.end_step(torch.arange(len(ids)))


class ChunkDecoder(WholeDecoder):
    """Runs a layer in pieces when there are more tokens than a probe has."""

    def after(
        self, number: int, layer: nn.Module, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        return torch.cat([layer(piece) for piece in hidden.split(8)])


class OwnChunkDecoder(ChunkDecoder, EagleModelMixin):
    def after(
        self, number: int, layer: nn.Module, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        hidden = super().after(number, layer, hidden, input_ids)
        self._maybe_add_hidden_state([], number + 1, hidden, None)
        return hidden


@pytest.mark.parametrize("decoder", [ChunkDecoder, OwnChunkDecoder])
def test_rows_in_several_pieces_break_the_step(decoder: Callable[[], nn.Module]) -> None:
    model = ToyModel(decoder)
    cache = proven(model, [2])
    cache.begin_step()
    with no_grad_and_context():
        model(torch.arange(20))
    with pytest.raises(BrokenInvariant, match=r"\(calls and rows by tap: \{2: \(3, 20\)\}\)"):
        cache.end_step(torch.arange(20))


class ZeroBeside(Whole):
    def forward(self, hidden_states: torch.Tensor) -> Any:
        return super().forward(hidden_states), torch.zeros_like(hidden_states)


class ZeroBesideDecoder(WholeDecoder, EagleModelMixin):
    """A layer gives something beside the stream that is zero for most tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ZeroBeside(number) for number in range(LAYERS))

    def after(
        self, number: int, layer: nn.Module, hidden: torch.Tensor, input_ids: torch.Tensor
    ) -> torch.Tensor:
        hidden, _ = layer(hidden)
        self._maybe_add_hidden_state([], number + 1, hidden, None)
        return hidden


def test_zeros_are_no_part_of_a_tap() -> None:
    plans = check_of(ToyModel(ZeroBesideDecoder)).choose([LAYERS])
    assert described(plans) == ["output 0 of model.layers.3"]


# A loop of vLLM's own ------------------------------------------------------------------------


class Mixer(nn.Module):
    """In place of Inkling's attention and experts."""

    def __init__(self, number: int):
        super().__init__()
        self.weight = weight(number)

    def forward(self, *given: Any) -> torch.Tensor:
        hidden = next(each for each in given if each is not None and each.is_floating_point())
        return torch.tanh(hidden @ self.weight)


@pytest.mark.parametrize("tap", [0, 1, 2, LAYERS])
def test_inkling_hands_on_half_of_its_stream_in_a_tuple(
    monkeypatch: pytest.MonkeyPatch, tap: int
) -> None:
    """Its decoder loop and layers as vLLM has them, without kernels."""
    inkling = pytest.importorskip("vllm.models.inkling.nvidia.model")

    def add_norm(delta: Any, hidden: Any, _conv: Any, norm: Any, _positions: Any) -> Any:
        stream = hidden + delta
        return (norm(stream) if norm is not None else None), stream

    def embed_norm(ids: torch.Tensor, table: torch.Tensor, *_: Any, **__: Any) -> Any:
        hidden = nn.functional.embedding(ids, table)
        return hidden, norm(hidden)

    one = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(inkling, "_sconv_add_norm", add_norm)
    monkeypatch.setattr(inkling, "embed_rmsnorm", embed_norm)
    monkeypatch.setattr(inkling, "get_pp_group", lambda: one)

    def layer(number: int) -> nn.Module:
        made = _bare(inkling.InklingDecoderLayer)
        made.attn_norm, made.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        made.attn, made.mlp = Mixer(number), Mixer(50 + number)
        made.attn_sconv, made.mlp_sconv = nn.Identity(), nn.Identity()
        return made

    def decoder() -> nn.Module:
        made = _bare(inkling.InklingModel)
        made.embed_tokens, made.embed_norm = nn.Embedding(VOCABULARY, WIDTH), None
        made.layers = nn.ModuleList(layer(number) for number in range(LAYERS))
        made.start_layer, made.end_layer = 0, LAYERS
        made.norm = nn.LayerNorm(WIDTH)
        made.config = SimpleNamespace(rms_norm_eps=1e-5, log_scaling_n_floor=None)
        return made  # type: ignore[no-any-return]

    model = ToyModel(decoder)
    model.forward = lambda input_ids: model.model(input_ids, torch.zeros_like(input_ids), None)
    with pytest.raises(Refused, match=f"tap {tap}: "):
        proven(model, [tap])


def _bare(kind: type[nn.Module]) -> Any:
    """A module without what its own start would load."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    return made
