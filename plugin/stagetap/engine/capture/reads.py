"""Which of the tensors that a module is given are the residual stream: found out by experiment.

Two tensors of a stream's shape go into most decoder layers, and most add them up. Some do not: a
layer of Command-R is handed the stream and what that was a layer before, and never reads this. Only
what a module makes of its inputs can tell. So it is given random ones: an input that changes
nothing when it is changed is not read, and two that can change places are added, since a sum is the
only use of two tensors here in which either may be the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from stagetap.engine.capture.bits import same_bits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stagetap.engine.capture.probe import Probe
    from stagetap.engine.capture.sites import Part, Site

EXPERIMENT = 3
"""Seed of these passes."""


def read_parts(
    probe: Probe, given: Mapping[Site, Mapping[Part, torch.Tensor]]
) -> dict[Site, tuple[Part, ...]]:
    """The parts that make the stream: one, two that are added, or none when it cannot be told.

    Args:
        probe: of the stage; every rank of it calls this with the same sites.
        given: what goes into modules, ``[rows, H]`` each, all of the stream's shape.
    """
    if not given:
        return {}
    experiment = _Experiment(probe, given)
    read = {site: experiment.read(site) for site in given}
    swapped = experiment.swapped({site: parts for site, parts in read.items() if len(parts) == 2})
    return {
        site: parts if len(parts) == 1 or site in swapped else () for site, parts in read.items()
    }


class _Experiment:
    """Passes in which all modules in question are given other tensors at once."""

    def __init__(self, probe: Probe, given: Mapping[Site, Mapping[Part, torch.Tensor]]):
        self._probe = probe
        self._outputs = {site: replace(site, moment="output") for site in given}
        numbers = torch.Generator().manual_seed(EXPERIMENT)
        self._first, self._other = (
            {
                site: {
                    part: torch.randn(value.shape, generator=numbers).to(value)
                    for part, value in parts.items()
                }
                for site, parts in given.items()
            }
            for _ in range(2)
        )
        self._made = self._make(self._first)
        self._changed: dict[tuple[Site, Part], bool] = {}
        for number in range(max(map(len, given.values()), default=0)):
            asked = {
                site: list(parts)[number] for site, parts in given.items() if number < len(parts)
            }
            values = {site: dict(parts) for site, parts in self._first.items()}
            for site, part in asked.items():
                values[site][part] = self._other[site][part]
            made = self._make(values)
            for site, part in asked.items():
                self._changed[site, part] = not _equal(made[site], self._made[site])

    def read(self, site: Site) -> tuple[Part, ...]:
        """The parts that change what the module makes."""
        return tuple(part for part in self._first[site] if self._changed[site, part])

    def swapped(self, pairs: Mapping[Site, Sequence[Part]]) -> set[Site]:
        """The modules that make the same when two of their inputs have changed places."""
        if not pairs:
            return set()
        values = {site: dict(parts) for site, parts in self._first.items()}
        for site, (one, other) in pairs.items():
            first = self._first[site]
            values[site] |= {one: first[other], other: first[one]}
        made = self._make(values)
        return {site for site in pairs if _equal(made[site], self._made[site])}

    def _make(
        self, values: Mapping[Site, Mapping[Part, torch.Tensor]]
    ) -> dict[Site, list[torch.Tensor]]:
        """What each module gives, without what it only hands on."""
        seen = self._probe.run(EXPERIMENT, self._outputs.values(), replaced=values)
        return {
            site: [
                tensor
                for tensor in seen.at.get(output, {}).values()
                if not any(same_bits(tensor, value) for value in values[site].values())
            ]
            for site, output in self._outputs.items()
        }


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(same_bits, some, others))
