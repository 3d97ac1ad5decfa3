"""Two datasets, sample by sample and tensor by tensor: pure functions over what a reader returns.

Nothing is taken on trust: shapes, dtypes, order of layers, token ids and every bit of every tensor.
A comparison of nothing is not equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stagetap.equivalence.metrics import Metrics, measure, relative_ulp, total
from stagetap.errors import SampleError

TOLERATED_ULP = 2
"""``--tolerant``: as if every number were off by this many ULP, which batching alone does."""


class Sample(Protocol):
    """The part of :class:`stagetap.reader.Sample` that is compared."""

    input_ids: Any
    manifest: Any

    @property
    def layer_ids(self) -> tuple[int, ...]: ...

    @property
    def hidden_states(self) -> Any: ...

    @property
    def last_hidden_states(self) -> Any: ...


class Samples(Protocol):
    """Samples by id, as an opened dataset has them."""

    sample_ids: Sequence[str]

    def __getitem__(self, sample_id: str) -> Any: ...


@dataclass(frozen=True)
class Problem:
    """Something that no number expresses: a missing sample, another shape, another dtype."""

    sample_id: str | None
    layer: int | None
    what: str

    def __str__(self) -> str:
        where = [] if self.sample_id is None else [f"sample {self.sample_id!r}"]
        where += [] if self.layer is None else [f"layer {self.layer}"]
        return ": ".join([", ".join(where), self.what]) if where else self.what


@dataclass(frozen=True)
class Compared:
    """One tensor that both sides have; ``layer`` is None for the token ids."""

    sample_id: str
    layer: int | None
    metrics: Metrics
    tolerated_relative: float


@dataclass(frozen=True)
class Comparison:
    """The outcome. Everything else is derived from its two lists."""

    samples: int
    tensors: tuple[Compared, ...]
    problems: tuple[Problem, ...]

    @property
    def bitwise(self) -> bool:
        """Whether there was something to compare and every bit of it is equal."""
        return self._sound and all(tensor.metrics.bitwise for tensor in self.tensors)

    @property
    def tolerable(self) -> bool:
        """Whether no row is further off than :data:`TOLERATED_ULP`, and all token ids are equal."""
        return self._sound and all(
            tensor.metrics.bitwise
            if tensor.layer is None
            else not tensor.metrics.unordered
            and tensor.metrics.max_relative <= tensor.tolerated_relative
            for tensor in self.tensors
        )

    @property
    def _sound(self) -> bool:
        return self.samples > 0 and bool(self.tensors) and not self.problems

    @property
    def hidden(self) -> Metrics:
        """The metrics of all hidden states as one."""
        return total(tensor.metrics for tensor in self.tensors if tensor.layer is not None)

    def layer(self, layer_id: int) -> Metrics:
        """The metrics of one layer over all samples."""
        return total(tensor.metrics for tensor in self.tensors if tensor.layer == layer_id)

    def findings(self) -> Iterator[str]:
        """Every reason why this is not bitwise equal, one line each, naming sample and layer."""
        yield from map(str, self.problems)
        if not self.samples and not self.problems:
            yield "no sample was compared"
        for tensor in self.tensors:
            found = tensor.metrics
            if not found.bitwise:
                what = (
                    f"{found.differing} of {found.elements} elements differ, max_abs "
                    f"{found.max_abs:.3g}, {found.max_ulp:.0f} ULP, relative "
                    f"{found.max_relative:.3g}"
                    + (f", {found.unordered} NaN or infinite" if found.unordered else "")
                    if tensor.layer is not None
                    else f"input_ids: {found.differing} of {found.elements} differ"
                )
                yield str(Problem(tensor.sample_id, tensor.layer, what))


def compare_datasets(
    reference: Samples, candidate: Samples, prompts: Mapping[str, Sequence[int]] | None = None
) -> Comparison:
    """Compare the same samples of two datasets.

    Args:
        reference: what is right.
        candidate: what is in question.
        prompts: sample id -> its prompt's token ids: exactly these samples must be in both, each
            with this prompt. Absent: both must hold the same samples.
    """
    tensors: list[Compared] = []
    problems: list[Problem] = []
    compared = 0
    nonzero: dict[int, bool] = {}  # layer id -> whether any sample has a number there
    wanted = list(prompts) if prompts is not None else _all_ids(reference, candidate)
    for sample_id in wanted:
        try:
            ours, theirs = candidate[sample_id], reference[sample_id]
            found = compare_samples(theirs, ours, None if prompts is None else prompts[sample_id])
        except SampleError as error:
            problems.append(Problem(sample_id, error.layer, str(error)))
            continue
        compared += 1
        tensors += found.tensors
        problems += found.problems
        for layer_id, states in _layers(ours).items():
            nonzero[layer_id] = nonzero.get(layer_id, False) or bool(states.any())
    problems += [
        Problem(None, layer_id, "all zeros in every sample: nothing was captured")
        for layer_id, found in nonzero.items()
        if not found
    ]
    return Comparison(compared, tuple(tensors), tuple(problems))


def compare_samples(
    reference: Sample, candidate: Sample, prompt: Sequence[int] | None = None
) -> Comparison:
    """Compare what the reader returns for one sample of each side.

    Raises:
        SampleError: a side cannot be read.
    """
    sample_id = candidate.manifest.sample_id
    tensors: list[Compared] = []
    problems: list[Problem] = []

    def compare(layer: int | None, ours: torch.Tensor, theirs: torch.Tensor) -> None:
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            problems.append(
                Problem(sample_id, layer, f"{_kind(ours)} where the reference has {_kind(theirs)}")
            )
            return
        tolerated = TOLERATED_ULP * relative_ulp(ours.dtype) if ours.is_floating_point() else 0.0
        tensors.append(Compared(sample_id, layer, measure(ours, theirs), tolerated))

    ours_asked = tuple(candidate.manifest.tapped.layer_ids)
    theirs_asked = tuple(reference.manifest.tapped.layer_ids)
    if ours_asked != theirs_asked:
        what = f"layer ids {list(ours_asked)} where the reference has {list(theirs_asked)}"
        return Comparison(1, (), (Problem(sample_id, None, what),))
    compare(None, candidate.input_ids, reference.input_ids)
    if prompt is not None and candidate.input_ids[: len(prompt)].tolist() != list(prompt):
        problems.append(Problem(sample_id, None, "input_ids do not begin with the prompt"))
    ours_layers, theirs_layers = _layers(candidate), _layers(reference)
    for layer in ours_asked:
        if layer in ours_layers and layer in theirs_layers:
            compare(layer, ours_layers[layer], theirs_layers[layer])
        else:
            problems.append(Problem(sample_id, layer, "the reader returns no states"))
    return Comparison(1, tuple(tensors), tuple(problems))


def _layers(sample: Sample) -> dict[int, torch.Tensor]:
    """Every layer with its states ``[T, H]``, out of the tensors that a trainer would use."""
    columns = sample.hidden_states.unbind(1)
    layers = dict(zip(sample.layer_ids, columns, strict=True))
    if sample.last_hidden_states is not None:
        layers[sample.manifest.tapped.num_hidden_layers] = sample.last_hidden_states
    return layers


def _all_ids(reference: Samples, candidate: Samples) -> list[str]:
    return list(dict.fromkeys([*reference.sample_ids, *candidate.sample_ids]))


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
