"""Watching a model's own tap code while it runs, without touching it.

Two kinds exist in vLLM. Most models call ``EagleModelMixin._maybe_add_hidden_state`` after every
layer, on every stage, whether or not anybody asked for that tap. Some append to a list called
``aux_hidden_states`` inside their forward when the layer was asked for. Python's profile hook sees
both: the arguments of the call, and the list when the forward returns.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.model_executor.models.interfaces import EagleModelMixin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    import torch
    from torch import nn

TAP_CALL = EagleModelMixin._maybe_add_hidden_state.__code__
TAP_LIST = "aux_hidden_states"
ASKED = "aux_hidden_state_layers"


@contextmanager
def watch_own_taps(
    decoder: nn.Module,
    on_call: Callable[[torch.Tensor, torch.Tensor | None], None],
    on_list: Callable[[list[torch.Tensor]], None],
) -> Iterator[None]:
    """Tell what a model's own tap code is given, in this thread, until the context ends.

    Args:
        decoder: the module that runs the layers.
        on_call: gets hidden states and residual of every call of the mixin's method.
        on_list: gets the list that the decoder's forward has filled, when it returns.
    """

    def look(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code is TAP_CALL:
            given = frame.f_locals
            on_call(given["hidden_states"], given["residual"])
        elif event == "return" and frame.f_code is forward:
            found = frame.f_locals.get(TAP_LIST)
            if isinstance(found, list):
                on_list(found)

    forward = getattr(type(decoder).forward, "__code__", None)
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


def lists_own_taps(model: nn.Module, decoder: nn.Module) -> bool:
    """Whether a model has tap code that has to be asked first."""
    return hasattr(model, "set_aux_hidden_state_layers") and hasattr(decoder, ASKED)


@contextmanager
def asking_for(model: nn.Module, decoder: nn.Module, layer_id: int) -> Iterator[None]:
    """Ask the model's own tap code for one tap, through vLLM's interface for that."""
    before = tuple(getattr(decoder, ASKED))
    model.set_aux_hidden_state_layers((layer_id,))
    try:
        yield
    finally:
        model.set_aux_hidden_state_layers(before)
