"""At start: find where a loaded model's taps can be read, and prove it on the real weights.

A tap is what the model's own capture gives with one stage. So a probe with random inputs looks at
every place where that tensor could be read, and takes one whose bits are those that the model's own
tap code was given. For a model without tap code it takes what the next layer reads, and holds it
against what the layer before has made. A second probe, with other inputs, then compares what the
installed hooks have stored. No list of architectures decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from stagetap.engine.capture.attention_residuals import INTO_LAYER, OUT_OF_LAYER, mixture
from stagetap.engine.capture.bits import has_equal_rows, same_bits
from stagetap.engine.capture.own_taps import asking_for, lists_own_taps
from stagetap.engine.capture.reads import Reader, Reading, find_reads, reader_of
from stagetap.engine.capture.sites import Part, Site
from stagetap.errors import Refused
from stagetap.taps import STREAM_MIXTURE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch import nn

    from stagetap.engine.capture.cache import TapCache
    from stagetap.engine.capture.decoder import Decoder
    from stagetap.engine.capture.probe import Probe, Seen

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own name

CHOOSING, PROVING = 1, 2
"""Seeds of the two probes."""

OWN = "the model's own tap"

Entry = tuple[Part, ...]
"""Keys of what a stage receives that make the stream when they are added; none: it cannot tell."""


@dataclass(frozen=True)
class Reference:
    """What a tap must be, bit for bit: ``[rows, H]``, and where that was seen."""

    value: torch.Tensor
    seen: str


@dataclass(frozen=True)
class TapPlan:
    """Where one tap is read: one tensor, a sum of two, or what is computed from several."""

    layer_id: int
    site: Site
    parts: tuple[Part, ...]
    compute: Callable[..., torch.Tensor] | None = None

    def into(self, keep: Callable[..., None]) -> Callable[..., None]:
        """What a hook calls with the parts, so that ``keep`` gets the tap."""
        if self.compute is None:
            return keep
        compute = self.compute
        return lambda *parts: keep(compute(*parts))

    def describe(self) -> str:
        """In words."""
        read = self.site.describe(self.parts)
        return read if self.compute is None else f"computed by the model's own code from {read}"


@dataclass(frozen=True)
class Verdict:
    """One tap that was proven: where it is read, and what it was compared with."""

    layer_id: int
    stage: int
    captured: str
    compared_with: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def held(self) -> str:
        """What it was compared with, in general terms."""
        if self.compared_with == OWN:
            return "against the model's own tap code"
        if self.compared_with == self.captured:
            return "as the first layer reads it, with nothing before it to compare"
        return "against what the layer before gave"


class SelfCheck:
    """The check of one stage.

    Args:
        model: as vLLM has loaded it.
        decoder: its layers.
        probe: runs it with random inputs.
        stage: pipeline rank.
        last: whether this is the last stage.
        dtype: what taps are stored in.
        share: gives a value to all stages, and theirs back, by stage.
        stream: what they are of.
    """

    def __init__(
        self,
        model: nn.Module,
        decoder: Decoder,
        probe: Probe,
        *,
        stage: int,
        last: bool,
        dtype: torch.dtype,
        share: Callable[[Entry | None], list[Entry | None]],
        stream: str,
    ):
        self._model = model
        self._decoder = decoder
        self._probe = probe
        self._stage = stage
        self._last = last
        self._dtype = dtype
        self._stream = stream
        self._reads: dict[Site, Reading] = {}
        self._made: dict[int, tuple[Site, tuple[Part, ...]]] = {}
        later = [entry for entry in share(self._entry())[stage + 1 :] if entry is not None]
        self._next_entry: Entry | None = later[0] if later else None

    def _entry(self) -> Entry | None:
        """Which of the tensors that this stage receives are the stream; the stage before asks.

        None on the first stage, and on one that has no layer and hands on what it receives.
        """
        if self._stage == 0 or (self._decoder.start == self._decoder.end and not self._last):
            return None
        sites = self._sites(self._decoder.start)[:1] if self._has_layers else []
        seen = self._probe.run(CHOOSING, sites)
        site = sites[0] if sites else seen.after_layers
        given = seen.at.get(site, {}) if site is not None else {}
        parts: tuple[Part, ...] = ()
        if site is not None:
            reader = reader_of(site) if sites else self._final_reader(site)
            parts = find_reads(self._probe, [reader], {site: given})[site].parts
        keys = [
            key
            for part in parts
            for key, value in seen.received.items()
            if same_bits(value, given[part])
        ]
        return tuple(keys) if len(keys) == len(parts) else ()

    @property
    def _has_layers(self) -> bool:
        return self._decoder.start < self._decoder.end

    def choose(self, layer_ids: Iterable[int]) -> list[TapPlan]:
        """Where each of this stage's taps is read.

        Raises:
            Refused: a tap is nowhere to be read, or cannot be told from another.
        """
        return [
            self._choose(layer_id, reference, seen)
            for layer_id, reference, seen in self._references(tuple(layer_ids), CHOOSING)
        ]

    def prove(self, plans: Iterable[TapPlan], cache: TapCache) -> list[Verdict]:
        """Compare what the installed hooks store with what it must be.

        Raises:
            Refused: they differ.
        """
        by_id = {plan.layer_id: plan for plan in plans}
        verdicts = []
        for layer_id, reference, _ in self._references(
            cache.taps.layer_ids, PROVING, before=cache.begin_step
        ):
            column = cache.taps.layer_ids.index(layer_id)
            rows = reference.value.shape[0]
            captured = cache.buffer[column, :rows]
            calls, counted = cache.counts[column].tolist()
            if (calls, counted) != (1, rows) or not same_bits(captured, reference.value):
                raise self._refused(
                    layer_id,
                    f"what StageTap captures ({by_id[layer_id].describe()}, "
                    f"{calls} calls, {counted} rows) is not {reference.seen} "
                    f"({_shape(reference.value)})",
                )
            verdicts.append(
                Verdict(
                    layer_id=layer_id,
                    stage=self._stage,
                    captured=by_id[layer_id].describe(),
                    compared_with=reference.seen,
                    dtype=str(captured.dtype).removeprefix("torch."),
                    shape=tuple(captured.shape),
                )
            )
        return verdicts

    # What a tap must be ------------------------------------------------------------------------

    def _references(
        self, layer_ids: tuple[int, ...], seed: int, before: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[int, Reference, Seen]]:
        """Every asked tap with what it must be, right after the forward pass that shows it.

        Ranks of one stage run equally many passes, whatever they see.
        """
        sites = [site for layer_id in layer_ids for site in self._sites(layer_id)]
        before()
        seen = self._probe.run(seed, sites)
        if seed == CHOOSING:
            self._reads = self._find_reads(layer_ids, seed)
        must_be_asked = not seen.own and lists_own_taps(self._model, self._decoder.parent)
        known: dict[int, torch.Tensor] = {}
        for layer_id in layer_ids:
            if must_be_asked:
                before()
                asked = self._ask(layer_id, seed, sites)
                if asked is None:
                    before()
                    asked = self._probe.run(seed, sites)
                seen = asked
            reference = self._reference(layer_id, seen, known | seen.own)
            known[layer_id] = reference.value
            yield layer_id, reference, seen

    def _ask(self, layer_id: int, seed: int, sites: list[Site]) -> Seen | None:
        """A pass in which the model's own tap code gives one tap; None when it has none there."""
        try:
            with asking_for(self._model, self._decoder.parent, layer_id):
                return self._probe.run(seed, sites, asked=layer_id)
        except (AttributeError, RuntimeError, TypeError) as error:
            # DeepSeek-V3's adds a residual that does not exist before the first layer.
            logger.info(
                "stagetap: %s gives no tap %d of its own (%s: %s)",
                type(self._model).__name__,
                layer_id,
                type(error).__name__,
                error,
            )
            return None

    def _sites(self, layer_id: int) -> list[Site]:
        """Where a tap may be read, best first.

        What the next consumer gets comes first: some models change the stream between two layers
        (Qwen3-VL adds its deepstack there), and their own tap has that change.
        """
        decoder = self._decoder
        sites = []
        if layer_id < decoder.end:
            sites.append(Site(decoder.path_of(layer_id), decoder.layers[layer_id], "input"))
        elif not self._last:
            sites.append(Site("", self._model, "output"))
        if layer_id > decoder.start:
            previous = layer_id - 1
            sites.append(Site(decoder.path_of(previous), decoder.layers[previous], "output"))
        return sites

    def _find_reads(self, layer_ids: Iterable[int], seed: int) -> dict[Site, Reading]:
        """What every reader of this stage reads, if a tap has to be held against one of them."""
        decoder = self._decoder
        sites = [self._sites(index)[0] for index in range(decoder.start, decoder.end)]
        seen = self._probe.run(seed, sites)
        if all(layer_id in seen.own for layer_id in layer_ids):
            return {}
        readers = [reader_of(site) for site in sites]
        if self._last and seen.after_layers is not None:
            readers.append(self._final_reader(seen.after_layers))
        return find_reads(self._probe, readers, seen.at)

    def _final_reader(self, site: Site) -> Reader:
        """What the decoder calls after its last layer: whatever it is, the stage's output tells."""
        return Reader(site, Site("", self._model, "output"))

    def _consumer(self, layer_id: int, seen: Seen) -> Site | None:
        """Where the stream goes next on this stage, if it does."""
        if layer_id < self._decoder.end:
            return self._sites(layer_id)[0]
        return seen.after_layers if self._last else None

    def _reference(self, layer_id: int, seen: Seen, known: Mapping[int, torch.Tensor]) -> Reference:
        """What a tap must be; refused when it could not be told from another one in ``known``."""
        reference = self._find_reference(layer_id, seen)
        value = reference.value
        self._require_numbers(layer_id, reference)
        for other, stream in known.items():
            if other != layer_id and same_bits(stream, value):
                raise self._refused(
                    layer_id,
                    f"{reference.seen} equals that of tap {other} ({_shape(value)}): the layers "
                    "between them do nothing, or a tap was given another layer's id",
                )
        return reference

    def _require_numbers(self, layer_id: int, reference: Reference) -> None:
        """Refused when a tap's numbers could be equal to others by chance."""
        value = reference.value
        if value.dtype != self._dtype:
            raise self._refused(
                layer_id, f"{reference.seen} is {value.dtype}, and taps are stored as {self._dtype}"
            )
        if not value.isfinite().all():
            raise self._refused(
                layer_id, f"{reference.seen} has numbers that are not finite ({_shape(value)})"
            )
        if not value.any():
            raise self._refused(layer_id, f"{reference.seen} is zero ({_shape(value)})")
        if has_equal_rows(value):
            raise self._refused(
                layer_id, f"{reference.seen} has equal rows for different tokens ({_shape(value)})"
            )

    def _find_reference(self, layer_id: int, seen: Seen) -> Reference:
        if layer_id in seen.odd_rows:
            raise self._refused(
                layer_id,
                f"it has {seen.odd_rows[layer_id]} rows in a step of another number of tokens; "
                "shards of a sequence (sequence parallelism) are not gathered in this version: "
                "start without expert or sequence parallelism",
            )
        if layer_id in seen.own:
            return Reference(seen.own[layer_id], OWN)
        if self._is_computed(layer_id):
            raise self._refused(layer_id, "the model's own tap code gives none to compare it with")
        if layer_id not in self._made:
            self._made[layer_id] = self._find_made(layer_id, seen)
        site, parts = self._made[layer_id]
        return Reference(_sum(seen.at[site][part] for part in parts), site.describe(parts))

    def _find_made(self, layer_id: int, seen: Seen) -> tuple[Site, tuple[Part, ...]]:
        """What the layer before has made of that which the next reads.

        The first layer of all has none before it: there it is what it reads.
        """
        reader, parts = self._next_reads(layer_id, seen)
        value = _sum(seen.at[reader][part] for part in parts)
        if layer_id == self._decoder.start:
            return reader, parts
        site = self._sites(layer_id)[-1]
        self._require_numbers(layer_id, Reference(value, reader.describe(parts)))
        if (made := _parts_of(seen.at.get(site, {}), value)) is None:
            raise self._refused(
                layer_id,
                f"{reader.describe(parts)} ({_shape(value)}) is not what comes out of the layer "
                f"before ({_described(site, seen)}): the model changes the stream between them",
            )
        return site, made

    def _next_reads(self, layer_id: int, seen: Seen) -> tuple[Site, tuple[Part, ...]]:
        """What goes to the stream's next reader, and which parts of it are the stream."""
        if layer_id == self._decoder.end and not self._last:
            site = self._sites(layer_id)[0]
            if not self._next_entry or not set(self._next_entry) <= set(seen.at.get(site, {})):
                raise self._refused(
                    layer_id, "the next stage cannot tell which tensors it reads as the stream"
                )
            return site, self._next_entry
        consumer = self._consumer(layer_id, seen)
        if consumer is None:
            raise self._refused(layer_id, "nothing is called after the last layer to check it")
        reading = self._reads.get(consumer, Reading((), "was not seen"))
        if not reading.parts:
            given = seen.at.get(consumer, {})
            raise self._refused(
                layer_id,
                f"{len(given)} tensors of the right shape go {consumer.describe(tuple(given))}: "
                f"StageTap finds that it {reading.why_not}",
            )
        return consumer, reading.parts

    # Where it is read -----------------------------------------------------------------------

    def _is_computed(self, layer_id: int) -> bool:
        """Whether no module is given this tap; the embedding output is nobody's mixture."""
        return self._stream == STREAM_MIXTURE and layer_id > 0

    def _choose(self, layer_id: int, reference: Reference, seen: Seen) -> TapPlan:
        sites = self._sites(layer_id)
        if self._is_computed(layer_id):
            taken = INTO_LAYER if sites[0].moment == "input" else OUT_OF_LAYER
            return TapPlan(layer_id, sites[0], taken, mixture(self._decoder.parent, layer_id))
        if reference.seen != OWN:
            return TapPlan(layer_id, *self._next_reads(layer_id, seen))
        for site in sites:
            chosen = _parts_of(seen.at.get(site, {}), reference.value)
            if chosen is not None:
                return TapPlan(layer_id, site, chosen)
        raise self._refused(
            layer_id,
            f"{reference.seen} ({_shape(reference.value)}) is not to be read anywhere "
            f"(looked at: {'; '.join(_described(site, seen) for site in sites)})",
        )

    def _refused(self, layer_id: int, why: str) -> Refused:
        return Refused(
            f"{type(self._model).__name__}, stage {self._stage}, tap {layer_id}: {why}; StageTap "
            "cannot capture this tap from this model"
        )


def _parts_of(parts: Mapping[Part, torch.Tensor], value: torch.Tensor) -> tuple[Part, ...] | None:
    """One part, or two, that make a tensor when they are added; a zero adds nothing to be seen."""
    numbers = {part: tensor for part, tensor in parts.items() if tensor.any()}
    for chosen in chain(combinations(numbers, 1), combinations(numbers, 2)):
        if same_bits(_sum(numbers[part] for part in chosen), value):
            return chosen
    return None


def _sum(streams: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *rest = streams
    return first + rest[0] if rest else first


def _described(site: Site, seen: Seen) -> str:
    return site.describe(tuple(seen.at.get(site, {})))


def _shape(value: torch.Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
