"""One forward pass of a loaded stage with random inputs, watched from outside.

It is none of vLLM's profiling runs: those feed zeros to later stages, so that rows and layers could
not be told apart.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.sequence import IntermediateTensors

from stagetap.engine.capture.own_taps import watch_own_taps
from stagetap.engine.capture.sites import Part, Site, streams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import nn

    from stagetap.engine.capture.decoder import Decoder

ROWS = 16
"""Tokens in a probe: enough to tell rows apart, few enough to cost nothing."""

RECEIVED = 1 << 16
"""Added to the seed of what a stage receives."""


ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)


@dataclass
class Seen:
    """What one probe has seen.

    Attributes:
        at: tensors ``[rows, H]`` of every watched site, by site and part.
        own: what the model's own tap code was given, by layer id, ``[rows, H]``.
        odd_rows: ids of taps that had another number of rows than the step, with that number.
        after_layers: what the decoder called first after its last layer: its final norm, if any.
        received: tensors ``[rows, H]`` that a later stage was given, by their key.
    """

    at: dict[Site, dict[Part, torch.Tensor]] = field(default_factory=dict)
    own: dict[int, torch.Tensor] = field(default_factory=dict)
    odd_rows: dict[int, int] = field(default_factory=dict)
    after_layers: Site | None = None
    received: dict[Part, torch.Tensor] = field(default_factory=dict)


class Probe:
    """Runs a stage with random inputs.

    Args:
        model: as vLLM has loaded it.
        decoder: its layers.
        width: hidden size.
        vocabulary: token ids are drawn below it.
        forward: lets vLLM run the model with so many dummy tokens.
        mixers: attention and state-space layers. Without caches vLLM skips them: some give zeros,
            some whatever was in their output's memory. Here they give random rows instead.
        rows: how many.
        longest: positions are drawn below it.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: Decoder,
        *,
        width: int,
        vocabulary: int,
        longest: int,
        forward: Callable[[int], object],
        mixers: Iterable[nn.Module],
        rows: int = ROWS,
    ):
        self._model = model
        self._decoder = decoder
        self._width = width
        self._vocabulary = vocabulary
        self._longest = longest
        self._forward = forward
        self._mixers = tuple(mixers)
        self._rows = rows

    def run(
        self,
        seed: int,
        sites: Iterable[Site] = (),
        asked: int | None = None,
        replaced: Mapping[Site, Mapping[Part, torch.Tensor]] | None = None,
        received: int | None = None,
    ) -> Seen:
        """One forward pass.

        Args:
            seed: of the random inputs; all ranks of a stage use the same.
            sites: what to watch.
            asked: the id for which the model's own tap code was asked, if it has to be.
            replaced: what modules are given instead of what came before them, ``[rows, H]``.
            received: seed of what a later stage receives; by default that of all inputs.
        """
        seen = Seen()
        last_run = self._decoder.start - 1

        def ran(index: int) -> None:
            nonlocal last_run
            last_run = index

        def noted(site: Site, parts: dict[Part, Any]) -> None:
            seen.at[site] = streams(parts, self._rows, self._width)

        def called(site: Site, parts: dict[Part, Any]) -> None:
            if last_run == self._decoder.end - 1 and seen.after_layers is None:
                seen.after_layers = site
                noted(site, parts)

        def own(hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
            stream = hidden.detach() if residual is None else (hidden + residual).detach()
            note_own(last_run + 1, stream)

        def listed(taps: list[torch.Tensor]) -> None:
            if asked is not None and len(taps) == 1:
                note_own(asked, taps[0].detach())

        def note_own(layer_id: int, stream: torch.Tensor) -> None:
            if stream.numel() != self._rows * self._width:
                seen.odd_rows[layer_id] = stream.numel() // self._width
            else:
                seen.own[layer_id] = stream.reshape(self._rows, self._width).clone()

        with ExitStack() as stack:
            for site, values in (replaced or {}).items():
                stack.callback(site.replace(values).remove)
            for site in sites:
                stack.callback(site.watch(partial(noted, site)).remove)
            for name, child in self._decoder.parent.named_children():
                if child is not self._decoder.layers:
                    site = Site(name, child, "input")
                    stack.callback(site.watch(partial(called, site)).remove)
            for index in range(self._decoder.start, self._decoder.end):
                layer = self._decoder.layers[index]
                hook = layer.register_forward_hook(lambda *_, index=index: ran(index))
                stack.callback(hook.remove)
            numbers = torch.Generator().manual_seed(seed)
            for mixer in self._mixers:
                stack.callback(
                    mixer.register_forward_hook(_random_output(numbers), with_kwargs=True).remove
                )
            random = _RandomInputs(
                self._model,
                numbers,
                vocabulary=self._vocabulary,
                longest=self._longest,
                # Of its own, so that all other numbers stay when it is seeded otherwise.
                received=torch.Generator().manual_seed(
                    RECEIVED + (seed if received is None else received)
                ),
            )
            stack.enter_context(random)
            stack.enter_context(_NoUnsetMemory(seed))
            stack.enter_context(watch_own_taps(self._decoder.parent, own, listed))
            self._forward(self._rows)
        seen.received = streams(random.received, self._rows, self._width)
        return seen


class _RandomInputs:
    """While it is entered, a model gets random inputs whatever vLLM gives it, and runs eagerly."""

    def __init__(
        self,
        model: nn.Module,
        numbers: torch.Generator,
        *,
        vocabulary: int,
        longest: int,
        received: torch.Generator,
    ):
        self._model = model
        self._vocabulary = vocabulary
        self._longest = longest
        self._numbers = numbers
        self._received = received
        self._stack = ExitStack()
        self.received: dict[Part, torch.Tensor] = {}

    def __enter__(self) -> None:
        before = self._model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        after = self._model.register_forward_hook(self._after, always_call=True)
        self._stack.callback(before.remove)
        self._stack.callback(after.remove)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _before(
        self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        eager = override_forward_context(replace(get_forward_context(), skip_compiled=True))
        self._eager = ExitStack()
        self._eager.enter_context(eager)
        return args, {name: self._random(name, each) for name, each in kwargs.items()}

    def _after(self, _model: nn.Module, _args: Any, output: Any) -> Any:
        self._eager.close()
        # With its own tap code asked a last stage gives its taps as well; nobody wants them here.
        return output[0] if isinstance(output, tuple) else output

    def _random(self, name: str, value: Any) -> Any:
        numbers = self._numbers
        if isinstance(value, IntermediateTensors):
            given = {key: _like(each, self._received) for key, each in value.tensors.items()}
            # Some models add in place to what they receive.
            self.received = {key: each.clone() for key, each in given.items()}
            return IntermediateTensors(given)
        if name == "inputs_embeds" and isinstance(value, torch.Tensor):
            return _like(value, numbers)
        if name == "positions" and isinstance(value, torch.Tensor):
            # vLLM's dummy requests have one token each, all at position 0.
            return torch.randint(0, self._longest, value.shape, generator=numbers).to(value)
        if name == "input_ids" and isinstance(value, torch.Tensor):
            ids = torch.randperm(self._vocabulary, generator=numbers)[: value.numel()]
            return ids.to(value).reshape(value.shape)
        return value


class _NoUnsetMemory(TorchDispatchMode):
    """While it is entered, new memory holds random numbers and not what was there before.

    A layer that vLLM skips, called in a way that no hook sees, gives its output as allocated: NaN
    as likely as not, which would make all taps after it equal.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._seed = seed
        self._numbers: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and made.dtype in (torch.bfloat16, torch.float16, torch.float32):
            if made.device not in self._numbers:
                numbers = torch.Generator(made.device).manual_seed(self._seed)
                self._numbers[made.device] = numbers
            made.uniform_(-1, 1, generator=self._numbers[made.device])
        return made


def _random_output(numbers: torch.Generator) -> Callable[..., Any]:
    """A hook that fills what a layer gives, or the tensor that it was given to fill."""

    def fill(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return _like(output, numbers)
        given = kwargs.get("output")
        if output is None and isinstance(given, torch.Tensor):
            given.copy_(_like(given, numbers))
        return output

    return fill


def _like(value: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    if not value.is_floating_point():
        return value
    return torch.randn(value.shape, generator=numbers).to(value)
