"""One weight of a model: its shape on one GPU, and what it counts for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["routed_experts", "sharded", "replicated"]
KINDS: tuple[Kind, ...] = ("routed_experts", "sharded", "replicated")


@dataclass(frozen=True)
class Weight:
    """A matrix ``[rows, columns]`` or, with one column, a vector, as one rank holds it.

    Attributes:
        name: of its module in a checkpoint, against which quantization patterns are held.
        kind: whether ranks hold experts, shares or copies of it.
        rows: output size on one rank.
        columns: input size on one rank.
        elements: of the whole model, without copies and padding.
        copies: how many such matrices one rank holds: its experts.
        linear: whether it belongs to a layer that quantization is about.
        itemsize: bytes per element where the model's dtype does not say.
    """

    name: str
    kind: Kind
    rows: int
    columns: int
    elements: int
    copies: int = 1
    linear: bool = True
    itemsize: int | None = None

    @property
    def local_elements(self) -> int:
        """Elements that one rank holds."""
        return self.copies * self.rows * self.columns


def column_parallel(name: str, out: int, inner: int, local_out: int, bias: bool) -> list[Weight]:
    """A linear layer whose outputs are spread over ranks, its bias with them."""
    found = [Weight(name, "sharded", local_out, inner, out * inner)]
    return [*found, vector(f"{name}.bias", out, local_out)] if bias else found


def row_parallel(name: str, out: int, inner: int, local_in: int, bias: bool) -> list[Weight]:
    """A linear layer whose inputs are spread over ranks; every rank holds the whole bias."""
    found = [Weight(name, "sharded", out, local_in, out * inner)]
    return [*found, vector(f"{name}.bias", out)] if bias else found


def replicated(name: str, out: int, inner: int, linear: bool = True) -> Weight:
    """A matrix that every rank holds in whole."""
    return Weight(name, "replicated", out, inner, out * inner, linear=linear)


def vector(name: str, size: int, local: int | None = None, itemsize: int | None = None) -> Weight:
    """A norm, bias or other vector: a copy on every rank, or ``local`` elements on each."""
    kind: Kind = "replicated" if local is None else "sharded"
    rows = size if local is None else local
    return Weight(name, kind, rows, 1, size, linear=False, itemsize=itemsize)
