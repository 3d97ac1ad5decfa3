"""Which decoder layers of a loaded model this stage runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn
from vllm.distributed.parallel_state import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.utils import PPMissingLayer

from stagetap.errors import Refused

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Decoder:
    """The decoder layers of one stage.

    Attributes:
        path: where the list of layers is in the model, such as ``model.layers``.
        parent: the module that holds the list, and runs it.
        layers: all N entries; those of other stages are placeholders.
        start: first layer that this stage runs.
        end: one past the last one.
    """

    path: str
    parent: nn.Module
    layers: nn.ModuleList
    start: int
    end: int

    def path_of(self, index: int) -> str:
        """The name of a layer, for messages."""
        return f"{self.path}.{index}"


def find_decoder(model: nn.Module, total: int) -> Decoder:
    """Find the list of decoder layers by its length, whatever the model calls it.

    vLLM keeps one entry per layer on every stage and puts placeholders where another stage runs the
    layer, so that the list itself says what this stage runs.

    Args:
        model: a model as vLLM has loaded it.
        total: N, its number of decoder layers.

    Raises:
        Refused: no list of that length, more than one, or one whose own layers have gaps.
    """
    language_model = model.get_language_model() if hasattr(model, "get_language_model") else model
    found = list(_lists(language_model, total))
    if len(found) > 1:
        # A draft head or an encoder may have as many layers; the decoder's parent knows its range.
        found = [one for one in found if hasattr(one[1], "start_layer")] or found
    if len(found) != 1:
        raise Refused(
            f"{type(model).__name__} has {len(found) or 'no'} lists of {total} decoder layers; "
            "StageTap cannot tell where its taps are: capture from another implementation of this "
            "model, such as --model-impl transformers"
        )
    ((path, parent, layers),) = found
    own = [index for index, layer in enumerate(layers) if not isinstance(layer, PPMissingLayer)]
    if not own:
        group = get_pp_group()
        start, end = get_pp_indices(total, group.rank_in_group, group.world_size)
    else:
        start, end = own[0], own[-1] + 1
    if len(own) != end - start:
        raise Refused(
            f"{type(model).__name__}: this stage runs layers {own} of {path}, which do not follow "
            "one another; use another pipeline partition"
        )
    return Decoder(path, parent, layers, start, end)


def _lists(model: nn.Module, length: int) -> Iterator[tuple[str, nn.Module, nn.ModuleList]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == length:
            yield path, model.get_submodule(path.rpartition(".")[0]), module
