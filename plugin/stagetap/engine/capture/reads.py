"""Which of the tensors that a module is given are the residual stream: found out by experiment.

Two tensors of a stream's shape go into most decoder layers, and most add them up. Some do not: a
layer of Command-R is handed the stream and what that was a layer before, and never reads this. Some
read more: a layer of Inkling is handed half of its stream in a tuple. Only what a module makes of
its inputs can tell. So it is given random ones:

- an input that changes nothing when it is changed is not read;
- two are added when what is taken from one may be put to the other;
- they are all of the stream when nothing changes though the layers before made something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from stagetap.engine.capture.bits import proves_something, same_bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stagetap.engine.capture.probe import Probe
    from stagetap.engine.capture.sites import Part, Site

EXPERIMENT, OTHERS = 3, 4
"""Seeds of these passes, and of what a stage receives when the layers before it go otherwise."""

STEPS = 8
"""Random inputs are multiples of 1/8 between -1 and 1, whose sums are exact in every dtype: what
moves from one summand to the other then leaves no trace."""


@dataclass(frozen=True)
class Reader:
    """A module that reads the stream.

    Attributes:
        site: what goes into it.
        made: what comes of that: its own output, or all that the stage makes.
    """

    site: Site
    made: Site


@dataclass(frozen=True)
class Reading:
    """What a reader reads of the tensors ``[rows, H]`` that it is given.

    Attributes:
        parts: one, or two that are added; none when the stream cannot be told.
        why_not: the reason then.
    """

    parts: tuple[Part, ...]
    why_not: str = ""


def find_reads(
    probe: Probe,
    readers: Sequence[Reader],
    given: Mapping[Site, Mapping[Part, torch.Tensor]],
) -> dict[Site, Reading]:
    """What each reader reads as the stream.

    Args:
        probe: of the stage; every rank of it calls this with the same readers.
        readers: all of the stage, in the order in which they run.
        given: what went into them in a pass without an experiment, ``[rows, H]`` each.
    """
    if not readers:
        return {}
    experiment = _Experiment(probe, readers, given)
    read = {reader.site: experiment.read(reader) for reader in readers}
    added = experiment.added({site: parts for site, parts in read.items() if len(parts) == 2})
    complete = experiment.complete()
    found: dict[Site, Reading] = {}
    for reader in readers:
        site, parts = reader.site, read[reader.site]
        why_not = ""
        if not parts or len(parts) > 2:
            why_not = "cannot tell which are the residual stream"
        elif len(parts) == 2 and site not in added:
            why_not = "reads two of them, and not as a sum"
        elif site not in complete:
            why_not = "reads something else as well that the layers before it made"
        found[site] = Reading(() if why_not else parts, why_not)
    for one, other in _handed_on(readers, found, given):
        for site in (one, other):
            found[site] = Reading((), "adds a tensor to the stream that other layers add again")
    return found


def _handed_on(
    readers: Sequence[Reader],
    found: Mapping[Site, Reading],
    given: Mapping[Site, Mapping[Part, torch.Tensor]],
) -> list[tuple[Site, Site]]:
    """Readers that follow one another and add the same tensor: it is no part of a running sum."""
    sums = [reader.site for reader in readers if len(found[reader.site].parts) == 2]
    return [
        (one, other)
        for one, other in pairwise(sums)
        if any(
            same_bits(given[one][part], given[other][part]) and proves_something(given[one][part])
            for part in set(found[one].parts) & set(found[other].parts)
        )
    ]


class _Experiment:
    """Passes in which all readers are given other tensors at once."""

    def __init__(
        self,
        probe: Probe,
        readers: Sequence[Reader],
        given: Mapping[Site, Mapping[Part, torch.Tensor]],
    ):
        self._probe = probe
        self._readers = tuple(readers)
        numbers = torch.Generator().manual_seed(EXPERIMENT)

        def draw() -> dict[Site, dict[Part, torch.Tensor]]:
            return {
                reader.site: {
                    part: _exact(value, numbers)
                    for part, value in given.get(reader.site, {}).items()
                }
                for reader in readers
            }

        self._first, self._other, self._moved = draw(), draw(), draw()
        self._made = self._make(self._first)
        self._changed: dict[tuple[Site, Part], bool] = {}
        for number in range(max(map(len, self._first.values()))):
            asked = {
                site: list(parts)[number]
                for site, parts in self._first.items()
                if number < len(parts)
            }
            values = {site: dict(parts) for site, parts in self._first.items()}
            for site, part in asked.items():
                values[site][part] = self._other[site][part]
            made = self._make(values)
            for site, part in asked.items():
                self._changed[site, part] = not _equal(made[site], self._made[site])

    def read(self, reader: Reader) -> tuple[Part, ...]:
        """The parts that change what comes of the reader."""
        return tuple(p for p in self._first[reader.site] if self._changed[reader.site, p])

    def added(self, pairs: Mapping[Site, Sequence[Part]]) -> set[Site]:
        """The readers to whom it is the same when one part gets what the other loses."""
        if not pairs:
            return set()
        values = {site: dict(parts) for site, parts in self._first.items()}
        for site, (one, other) in pairs.items():
            first, moved = self._first[site], self._moved[site][one]
            values[site] |= {one: first[one] + moved, other: first[other] - moved}
        made = self._make(values)
        return {site for site in pairs if _equal(made[site], self._made[site])}

    def complete(self) -> set[Site]:
        """The readers to whom nothing is handed of what came before them but their parts.

        Some readers get the tensors they had, the others and the stage get others. What a layer
        makes of these can reach a reader that got its own only in ways that nobody holds. Two
        readers differ in a bit of their numbers, so for each bit its two halves take turns, and
        every layer is once another one to every reader.
        """
        numbers = range(len(self._readers))
        # A layer that cannot be given other tensors makes nothing else: that would prove nothing.
        empty = [number for number in numbers if not self._first[self._readers[number].site]]
        complete = {number for number in numbers if not empty or number <= empty[0]}
        for bit in range(max(1, (len(numbers) - 1).bit_length())):
            for half in (0, 1):
                kept = [number for number in numbers if number >> bit & 1 == half]
                values = {
                    reader.site: (self._first if number in kept else self._other)[reader.site]
                    for number, reader in enumerate(self._readers)
                }
                made = self._make(values, received=OTHERS)
                for number in kept:
                    site = self._readers[number].site
                    if not _equal(made[site], self._made[site]):
                        complete.discard(number)
        return {self._readers[number].site for number in complete}

    def _make(
        self,
        values: Mapping[Site, Mapping[Part, torch.Tensor]],
        received: int | None = None,
    ) -> dict[Site, list[torch.Tensor]]:
        """What comes of each reader, without what it only hands on."""
        watched = [reader.made for reader in self._readers]
        seen = self._probe.run(EXPERIMENT, watched, replaced=values, received=received)
        return {
            reader.site: [
                tensor
                for tensor in seen.at.get(reader.made, {}).values()
                if not any(same_bits(tensor, value) for value in values[reader.site].values())
            ]
            for reader in self._readers
        }


def _exact(value: torch.Tensor, numbers: torch.Generator) -> torch.Tensor:
    """Random multiples of ``1 / STEPS`` of the shape and dtype of a tensor."""
    return (torch.randint(-STEPS, STEPS + 1, value.shape, generator=numbers) / STEPS).to(value)


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(same_bits, some, others))


def reader_of(site: Site) -> Reader:
    """A decoder layer, which makes its own output."""
    return Reader(site, replace(site, moment="output"))
