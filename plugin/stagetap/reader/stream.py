"""The samples of one rank, one after the other, resumable."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from stagetap.errors import Refused, StageTapError
from stagetap.reader.dataset import HiddenStatesDataset
from stagetap.reader.sample import Sample

STATE_VERSION = 1


class StreamState(msgspec.Struct, forbid_unknown_fields=True):
    """Where a pass over a stream stands.

    Positions count the samples of the rank. The pass began at `start` and comes to `position`
    next; worker `worker` of `workers` takes every `workers`-th sample from `start` on.
    """

    version: int
    order: dict[str, Any]
    rank: int
    world_size: int
    start: int
    position: int
    worker: int
    workers: int


class SampleStream(IterableDataset[Sample]):
    """An IterableDataset over the samples of one rank, shared out among DataLoader workers.

    Every pass starts at the beginning, or where a loaded state stood. A sample counts as done as
    soon as it was handed out. `state_dict` knows what this process handed out: with workers, use
    `loader`, or torchdata's StatefulDataLoader, which asks the workers.
    """

    def __init__(self, dataset: HiddenStatesDataset) -> None:
        """Use `HiddenStatesDataset.stream`."""
        self.dataset = dataset
        self._start = 0
        self._position = 0
        self._resumed_in: int | None = None  # the process that loaded a state for the next pass
        # Shared with forked and spawned workers, so that this process learns of their passes.
        self._used_by_workers = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[Sample]:
        worker, workers = _worker()
        if get_worker_info() is not None:
            self._used_by_workers.fill_(1)
            if self._resumed_in not in (None, os.getpid()):
                raise StageTapError(
                    "a stream that was resumed cannot be given to DataLoader workers, they would "
                    "resume every epoch: use stream.loader(num_workers=...)"
                )
        self._begin_pass()
        return self._hand_out(worker, workers)

    def state_dict(self) -> dict[str, Any]:
        """Where this process stands, as plain JSON values.

        Raises StageTapError when DataLoader workers did the reading: only they know.
        """
        if get_worker_info() is None and self._used_by_workers.item():
            raise StageTapError(
                "DataLoader workers read this stream, so this process does not know what was "
                "consumed: iterate stream.loader(num_workers=...) and take its state_dict()"
            )
        worker, workers = _worker()
        return self._state(worker, workers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue where `state` was taken.

        Raises Refused when it is not a state of this stream: another store, run, rank, number of
        ranks or of workers.
        """
        try:
            wanted = msgspec.convert(state, StreamState)
        except msgspec.ValidationError as error:
            raise Refused(f"not a state of a stream ({error}): give one it returned") from error
        worker, workers = _worker()
        ours = (STATE_VERSION, self.dataset.rank, self.dataset.world_size)
        theirs = (wanted.version, wanted.rank, wanted.world_size)
        if theirs != ours:
            raise Refused(
                f"the state is of version, rank, ranks {theirs}, this stream of {ours}: resume "
                "with the same number of ranks, each with its own state"
            )
        if wanted.workers != 1 and (wanted.worker, wanted.workers) != (worker, workers):
            raise Refused(
                f"the state is of worker {wanted.worker} of {wanted.workers}, this is worker "
                f"{worker} of {workers}: resume with the same number of workers"
            )
        self.dataset.load_state_dict(wanted.order)
        if not 0 <= wanted.start <= wanted.position <= len(self.dataset):
            raise Refused(
                f"the state stands at {wanted.position} of {len(self.dataset)} samples: it was "
                "changed since it was taken"
            )
        self._start = wanted.start
        self._position = wanted.position
        self._resumed_in = os.getpid()

    def loader(
        self, num_workers: int = 0, collate_fn: Callable[[Sample], Any] | None = None
    ) -> "SampleLoader":
        """A DataLoader over this stream that counts what was consumed.

        `collate_fn` is called in the worker, with one sample at a time.
        """
        return SampleLoader(self, num_workers, collate_fn)

    def _begin_pass(self) -> None:
        if self._resumed_in is None:
            self._start = self._position = 0
        self._resumed_in = None

    def _hand_out(self, worker: int, workers: int) -> Iterator[Sample]:
        for position in _share(self.dataset, self._start, worker, workers):
            if position >= self._position:
                sample = self.dataset[position]
                # Not before it was read: a sample that could not be read is not done.
                self._position = position + 1
                yield sample
        self._start = self._position = 0

    def _state(self, worker: int, workers: int) -> dict[str, Any]:
        state = StreamState(
            version=STATE_VERSION,
            order=self.dataset.state_dict(),
            rank=self.dataset.rank,
            world_size=self.dataset.world_size,
            start=self._start,
            position=self._position,
            worker=worker,
            workers=workers,
        )
        return msgspec.to_builtins(state)


class SampleLoader:
    """What a pass over a DataLoader yields, in order, and how far it was consumed."""

    def __init__(
        self,
        stream: SampleStream,
        num_workers: int,
        collate_fn: Callable[[Sample], Any] | None,
    ) -> None:
        """Use `SampleStream.loader`."""
        self._stream = stream
        self._num_workers = num_workers
        self._collate_fn = collate_fn

    def __iter__(self) -> Iterator[Any]:
        stream = self._stream
        stream._begin_pass()
        rest = _Rest(stream.dataset, stream._position)
        # One sample a task: the loader then gives them in the order of the stream, whichever
        # worker is faster, and what was consumed is a prefix.
        loader = DataLoader(
            rest, batch_size=None, num_workers=self._num_workers, collate_fn=self._collate_fn
        )
        for item in loader:
            stream._position += 1
            yield item
        stream._start = stream._position = 0

    def state_dict(self) -> dict[str, Any]:
        """What was consumed, as plain JSON values; any number of workers can resume from it."""
        return self._stream._state(0, 1)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """As `SampleStream.load_state_dict`."""
        self._stream.load_state_dict(state)


class _Rest(IterableDataset[Sample]):
    """A dataset from one position on, shared out among DataLoader workers."""

    def __init__(self, dataset: HiddenStatesDataset, start: int) -> None:
        self._dataset = dataset
        self._start = start

    def __iter__(self) -> Iterator[Sample]:
        for position in _share(self._dataset, self._start, *_worker()):
            yield self._dataset[position]


def _share(dataset: HiddenStatesDataset, start: int, worker: int, workers: int) -> Iterator[int]:
    """The positions from `start` on that fall to one worker; follows a refresh."""
    position = start + worker
    while position < len(dataset):
        yield position
        position += workers


def _worker() -> tuple[int, int]:
    """This DataLoader worker and their number; (0, 1) outside of any."""
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
