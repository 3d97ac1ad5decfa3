"""Places in a model where a tap can be read, and how its tensors are told from others.

A tap is one tensor ``[tokens, hidden_size]`` or the sum of two: most decoder layers hand on
``hidden_states`` and ``residual`` apart and leave the addition to the next norm.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

Part = str | int | None
"""One tensor of a site: a parameter's name or place (input), a place or key (output), or None when
it is the whole output.
"""


@dataclass(frozen=True)
class Site:
    """What goes into a module, or what comes out of it.

    Attributes:
        path: the module's name in its model, for messages.
        module: where the hook goes.
        moment: before the module runs, or after.
    """

    path: str
    module: nn.Module = field(repr=False)
    moment: Literal["input", "output"]

    def watch(self, look: Callable[[dict[Part, Any]], None]) -> RemovableHandle:
        """Call ``look`` with all that goes in (by parameter name) or comes out, each time."""
        if self.moment == "output":
            return self.module.register_forward_hook(lambda _m, _a, output: look(spread(output)))
        names = parameter_names(self.module)

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given: dict[Part, Any] = {
                names[place] if place < len(names) else place: value
                for place, value in enumerate(args)
            }
            given.update(kwargs)
            look(given)

        return self.module.register_forward_pre_hook(before, with_kwargs=True)

    def replace(self, values: Mapping[Part, torch.Tensor]) -> RemovableHandle:
        """Give the module other tensors than it is given, each time; for what goes in alone."""
        names = parameter_names(self.module)

        def before(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            changed, named = list(args), dict(kwargs)
            for part, value in values.items():
                if part in named:
                    named[str(part)] = value.reshape(named[str(part)].shape).clone()
                else:
                    place = names.index(part) if isinstance(part, str) else part
                    assert place is not None
                    changed[place] = value.reshape(changed[place].shape).clone()
            return tuple(changed), named

        return self.module.register_forward_pre_hook(before, with_kwargs=True)

    def tap(self, parts: Sequence[Part], store: Callable[..., None]) -> RemovableHandle:
        """Call ``store`` with those parts of this site each time.

        What runs in the hook is plain indexing, which torch.compile traces.
        """
        if self.moment == "output":

            def after(_module: nn.Module, _args: Any, output: Any) -> None:
                store(*[_out(output, part) for part in parts])

            return self.module.register_forward_hook(after)
        names = parameter_names(self.module)
        places: list[tuple[Any, Any]] = [
            (part, names.index(part) if isinstance(part, str) and part in names else part)
            for part in parts
        ]

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            store(*[kwargs[name] if name in kwargs else args[place] for name, place in places])

        return self.module.register_forward_pre_hook(before, with_kwargs=True)

    def describe(self, parts: Sequence[Part]) -> str:
        """Such as ``hidden_states + residual into model.layers.4``."""
        what = "argument" if self.moment == "input" else "output"
        names = [f"{what} {part}" if isinstance(part, int) else part or what for part in parts]
        preposition = "into" if self.moment == "input" else "of"
        return f"{' + '.join(names)} {preposition} {self.path or 'the model'}".strip()


def parameter_names(module: nn.Module) -> list[str]:
    """Names of a module's positional arguments, in order."""
    return [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]


def spread(output: Any) -> dict[Part, Any]:
    """The tensors of a module's output, by their place or key."""
    if isinstance(output, torch.Tensor):
        return {None: output}
    if isinstance(output, (tuple, list)):
        return dict(enumerate(output))
    tensors = getattr(output, "tensors", None)  # vLLM's IntermediateTensors
    return dict(tensors) if isinstance(tensors, dict) else {}


def streams(parts: Mapping[Part, Any], rows: int, width: int) -> dict[Part, torch.Tensor]:
    """Copies ``[rows, width]`` of those tensors that can be a tap or a part of one."""
    return {
        part: value.detach().reshape(rows, width).clone()
        for part, value in parts.items()
        if isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.shape[-1:] == (width,)
        and value.numel() == rows * width
    }


def _out(output: Any, part: Part) -> Any:
    return output if part is None else output[part]
