"""One sample, put together from the fragments of its stages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from stagetap.errors import LayerNotTapped
from stagetap.manifest import Fragment, Manifest
from stagetap.stores.base import FragmentBytes
from stagetap.stores.checks import check_payload


class StageStates:
    """The tensor of one fragment, [T, L_stage, H], on the mapped file: nothing was copied yet."""

    def __init__(self, fragment: Fragment, stored: FragmentBytes) -> None:
        self.fragment = fragment
        dtype = getattr(torch, fragment.dtype)
        self.tensor = torch.frombuffer(stored.payload, dtype=dtype).view(fragment.shape)


class Sample:
    """Hidden states of T tokens.

    - `layer_ids`: the asked layer ids without the last one, in asked order;
    - `hidden_states` [T, L, H]: axis 1 is named by `layer_ids`;
    - `last_hidden_states` [T, H]: after the last layer, before the final norm, or None;
    - `input_ids` int64 [T];
    - `metadata`, `manifest`.

    All tensors are on the CPU and in the dtype of the model. Writing to them changes no file.
    """

    def __init__(
        self, manifest: Manifest, stages: Sequence[StageStates], input_ids: torch.Tensor
    ) -> None:
        self.manifest = manifest
        self.input_ids = input_ids
        self._stages = tuple(stages)
        self._assembled: _Assembled | None = None

    @property
    def sample_id(self) -> str:
        """The id under which the sample was exported."""
        return self.manifest.sample_id

    @property
    def metadata(self) -> dict[str, Any]:
        """The user's own JSON."""
        return self.manifest.metadata

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """The names of axis 1 of `hidden_states`, in asked order."""
        tapped = self.manifest.tapped
        return tuple(k for k in tapped.layer_ids if k != tapped.num_hidden_layers)

    @property
    def hidden_states(self) -> torch.Tensor:
        """[T, L, H]. Assembled at the first use and kept.

        A view on the stored bytes when one fragment holds these layers in this order, else one
        copy. The rows [L, H] are contiguous; between them the last layer may lie.
        """
        if self._assembled is None:
            self._assembled = _assemble(self._stages, self.layer_ids)
        return self._assembled.hidden_states

    @property
    def last_hidden_states(self) -> torch.Tensor | None:
        """[T, H], a view, or None when the last layer was not asked for.

        On what `hidden_states` assembled, if that took the last layer along, else on the stored
        bytes.
        """
        if self._assembled is not None and self._assembled.last is not None:
            return self._assembled.last
        last = self.manifest.tapped.num_hidden_layers
        return self.layer(last) if last in self.manifest.tapped.layer_ids else None

    def layer(self, layer_id: int) -> torch.Tensor:
        """[T, H]: a view on the stored bytes. Raises LayerNotTapped."""
        for stage in self._stages:
            for column, layer in enumerate(stage.fragment.layers):
                if layer.id == layer_id:
                    return stage.tensor[:, column]
        raise LayerNotTapped(
            f"sample {self.sample_id!r} holds no layer {layer_id!r}, only "
            f"{list(self.manifest.tapped.layer_ids)}: ask for one of these, or capture again",
            sample_id=self.sample_id,
        )

    def verify(self) -> None:
        """Compare every byte with its checksum. Raises ChecksumMismatch.

        Meaningful as long as nobody has written to the tensors.
        """
        for stage in self._stages:
            payload = memoryview(stage.tensor.view(torch.uint8).numpy()).cast("B")
            check_payload(self.manifest, stage.fragment, payload)

    def __repr__(self) -> str:
        manifest, tapped = self.manifest, self.manifest.tapped
        return (
            f"Sample({manifest.sample_id!r}, tokens={manifest.token_count}, "
            f"layer_ids={list(self.layer_ids)}, "
            f"last={tapped.num_hidden_layers in tapped.layer_ids}, dtype={tapped.dtype}, "
            f"stages={[stage.fragment.stage for stage in self._stages]})"
        )

    def __getstate__(self) -> dict[str, Any]:
        # Whoever receives the fragments can assemble them; sending both would double the bytes.
        return self.__dict__ | {"_assembled": None}


class _Assembled(NamedTuple):
    hidden_states: torch.Tensor  # [T, L, H]
    last: torch.Tensor | None  # [T, H], where it came along


def _assemble(stages: Sequence[StageStates], wanted: Sequence[int]) -> _Assembled:
    """The layers `wanted`, which are all but the last one, in this order."""
    # The last layer has the highest id: a fragment that begins with it holds no other.
    holders = [stage for stage in stages if stage.fragment.layers[0].role == "aux"]
    if not holders:
        return _Assembled(stages[0].tensor[:, :0], None)
    stored = [layer.id for stage in holders for layer in stage.fragment.layers]
    count = len(wanted)
    if stored[:count] != list(wanted):
        return _Assembled(_in_order(holders, wanted), None)
    # Copying the last layer along, where it is in one of these, costs less than stepping over it.
    tensors = [stage.tensor for stage in holders]
    whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
    return _Assembled(
        whole.narrow(1, 0, count), whole.select(1, count) if len(stored) > count else None
    )


def _in_order(stages: Sequence[StageStates], wanted: Sequence[int]) -> torch.Tensor:
    """[T, len(wanted), H], copied in runs of neighbouring columns."""
    target_of = {layer_id: column for column, layer_id in enumerate(wanted)}
    tokens, _, hidden = stages[0].tensor.shape
    out = stages[0].tensor.new_empty(tokens, len(wanted), hidden)
    for stage in stages:
        for start, end, target in _runs(stage.fragment, target_of):
            out[:, target : target + end - start].copy_(stage.tensor[:, start:end])
    return out


def _runs(fragment: Fragment, target_of: dict[int, int]) -> list[tuple[int, int, int]]:
    """Maximal runs of columns [start, end) that stay neighbours at `target`."""
    runs: list[tuple[int, int, int]] = []
    for column, layer in enumerate(fragment.layers):
        target = target_of.get(layer.id)
        if target is None:
            continue
        if runs:
            start, end, first = runs[-1]
            if column == end and target == first + end - start:
                runs[-1] = (start, column + 1, first)
                continue
        runs.append((column, column + 1, target))
    return runs
