"""A store as a PyTorch dataset."""

import operator
import os
import time
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from stagetap.errors import (
    AmbiguousSample,
    MissingFragment,
    Refused,
    SampleFailed,
    SampleNotFound,
    SampleTimeout,
    StreamMismatch,
)
from stagetap.manifest import NO_CHECKSUM, Manifest
from stagetap.reader.checks import check_numbers
from stagetap.reader.order import CommitOrder
from stagetap.reader.sample import Sample, StageStates
from stagetap.stores.base import CommitEntry, Failure, Invariant, StoreReader, open_store_reader
from stagetap.stores.checks import check_kind, check_tokens

if TYPE_CHECKING:
    from stagetap.reader.stream import SampleStream

_POLL_SECONDS = (0.01, 0.25)  # the first pause of a wait, and the longest


def open_dataset(
    uri: str | os.PathLike[str],
    *,
    run: str | None = None,
    stream: str | None = None,
    verify: bool | None = None,
) -> "HiddenStatesDataset":
    """The samples that are committed at `uri` now, a directory or `file:///path`.

    `run` keeps one run alone; one that has not begun is empty, to be followed by `refresh` and
    `wait` (where other runs are there, a warning says so: the name may be wrong). `stream` states
    the stream kind that is expected (`residual`, ...). `verify` compares the checksum of every
    sample that is read: by default in memory that others lend, and not in files. Sizes, identity
    and token digest are compared always.

    Raises ForeignStore when there is no store, StreamMismatch when it holds another stream kind,
    UnknownVersion, CorruptLog, StoreError, Refused.
    """
    reader = open_store_reader(uri)
    stored = reader.invariant.stream
    if stream is not None and stream != stored:
        raise StreamMismatch(
            f"{os.fspath(uri)} holds the stream {stored!r}, asked for was {stream!r}: a draft "
            "trained on the wrong stream fails silently; open another dataset or capture again"
        )
    dataset = HiddenStatesDataset(reader, CommitOrder(run), verify=verify)
    dataset.refresh()
    others = dataset.runs
    if run is not None and others and run not in others:
        warnings.warn(
            f"{os.fspath(uri)} has no run {run!r} yet; it has {', '.join(others)}", stacklevel=2
        )
    return dataset


class HiddenStatesDataset(Dataset[Sample]):
    """Committed samples, by position or by id.

    The order is by commit time and is fixed at opening; `refresh` appends to it. For a DataLoader
    use `batch_size=None` or a `collate_fn`: samples differ in length. A `collate_fn` that touches
    `hidden_states` assembles them in the worker.
    """

    def __init__(
        self,
        reader: StoreReader,
        order: CommitOrder,
        *,
        verify: bool | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Use `open_dataset`. `order` is shared with whoever else refreshes it."""
        self._reader = reader
        self._order = order
        self._verify = verify
        self.rank = rank
        self.world_size = world_size

    @property
    def invariant(self) -> Invariant:
        """What holds for every sample: model, layers, stream, dtype, sizes."""
        return self._reader.invariant

    @property
    def runs(self) -> list[str]:
        """The runs of which commits are known, whichever of them this dataset keeps."""
        return self._order.runs

    @property
    def entries(self) -> list[CommitEntry]:
        """The commits of this shard, in order."""
        return self._order.entries[self.rank :: self.world_size]

    @property
    def sample_ids(self) -> list[str]:
        """The ids of this shard, in order."""
        return [entry.sample_id for entry in self.entries]

    def __len__(self) -> int:
        return len(range(self.rank, len(self._order.entries), self.world_size))

    def __getitem__(self, key: int | str) -> Sample:
        """The sample at a position of this shard, or of an id, whichever shard it is in.

        Raises IndexError, SampleNotFound, AmbiguousSample; when the sample is not whole
        MissingFragment, TruncatedFragment, ForeignFile, TokenMismatch, ChecksumMismatch (with
        `verify`), MalformedManifest, UnknownVersion; StoreError.
        """
        return self._load(self._entry(key))

    def __contains__(self, sample_id: object) -> bool:
        """Whether ``self[sample_id]`` finds a sample. Raises TypeError for what is no id."""
        if not isinstance(sample_id, str):
            # Python's own way would read every sample and compare it.
            raise TypeError(f"only a sample id can be in a dataset, not {type(sample_id).__name__}")
        return bool(self._order.named(sample_id))

    def __iter__(self) -> Iterator[Sample]:
        position = 0
        while position < len(self):
            yield self[position]
            position += 1

    def manifest(self, key: int | str) -> Manifest:
        """The manifest of a sample, without looking at its fragments. Raises as `[key]` does."""
        manifest = self._reader.manifest(self._entry(key))
        check_kind(self.invariant, manifest)
        return manifest

    def refresh(self) -> int:
        """Append what was committed since; return how many samples, of all shards, that are."""
        self._learn()
        return self._order.extend()

    def shard(self, rank: int, world_size: int) -> "HiddenStatesDataset":
        """Every `world_size`-th sample from `rank` on: over all ranks each sample exactly once.

        A shard shares its order with the dataset it comes from, `refresh` included. While the store
        is still being written, ranks that open it at different moments see different orders: give
        all of them the one of rank 0, by `state_dict` and `load_state_dict`.
        """
        if world_size < 1:
            raise Refused(f"world_size {world_size}: give the number of ranks, 1 or more")
        if not 0 <= rank < world_size:
            raise Refused(
                f"rank {rank} is none of {world_size}: ranks count from 0 to {world_size - 1}"
            )
        if self.world_size != 1:
            raise Refused("this is a shard already: shard the whole dataset")
        return HiddenStatesDataset(
            self._reader, self._order, verify=self._verify, rank=rank, world_size=world_size
        )

    def stream(self, rank: int = 0, world_size: int = 1) -> "SampleStream":
        """The samples of one rank as an IterableDataset that can be resumed."""
        from stagetap.reader.stream import SampleStream

        return SampleStream(self if (rank, world_size) == (0, 1) else self.shard(rank, world_size))

    def wait(self, sample_id: str, timeout_s: float) -> Sample:
        """The sample, as soon as it is committed. Refreshes.

        Raises SampleTimeout after `timeout_s`, SampleFailed as soon as every attempt so far has
        failed, AmbiguousSample, and what reading a sample raises.
        """
        check_numbers(timeout_s=(timeout_s, 0))
        deadline = time.monotonic() + timeout_s
        pause, longest_pause = _POLL_SECONDS
        while True:
            self.refresh()
            if self._order.named(sample_id):
                return self[sample_id]
            failures = self._reader.failures(self._order.run_id, sample_id)
            if failures:
                raise sample_failed(failures[-1])
            left = deadline - time.monotonic()
            if left <= 0:
                raise SampleTimeout(
                    f"sample {sample_id!r} was not committed within {timeout_s:g} s: is its engine "
                    "running, and is this its store? Wait longer or export it again",
                    sample_id=sample_id,
                )
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest_pause)

    def delete(self, key: int | str) -> None:
        """Delete a sample from the store; one that is deleted already is no error.

        Samples that were read before stay readable as long as they are held. Out of Mooncake its
        memory is freed when the leases of those who read it have ended: this process ends only
        then, or when they should have. Raises IndexError,
        SampleNotFound for an id that was never committed, AmbiguousSample, StoreError.
        """
        sample_id = key if isinstance(key, str) else self._entry_at(key).sample_id
        attempts = self._order.attempts(sample_id)
        if not isinstance(key, str):
            run_id = self._entry_at(key).run_id
            attempts = [entry for entry in attempts if entry.run_id == run_id]
        if not attempts:
            raise _not_found(sample_id, "was never committed here: look at sample_ids")
        _one_run(sample_id, attempts)
        self._reader.delete(attempts)
        self._learn()

    def state_dict(self) -> dict[str, Any]:
        """The order of this dataset, as plain JSON values."""
        return self._order.state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take on the order of another dataset of the same store and run, whatever was added since.

        Raises Refused for a state of another store or run.
        """
        self._learn()
        self._order.restore(state)

    def _learn(self) -> None:
        self._order.learn(*self._reader.poll())

    def _entry(self, key: int | str) -> CommitEntry:
        if not isinstance(key, str):
            return self._entry_at(key)
        entries = self._order.named(key)
        if entries:
            return _one_run(key, entries)[0]
        if self._order.attempts(key):
            raise _not_found(key, "is deleted, or was committed since: refresh()")
        raise _not_found(key, "is not committed here: look at sample_ids, refresh() or wait()")

    def _entry_at(self, position: int) -> CommitEntry:
        """Raises IndexError."""
        index = operator.index(position)
        length = len(self)
        if not -length <= index < length:
            raise IndexError(f"position {index} of a dataset of {length} samples")
        return self._order.entries[self.rank + index % length * self.world_size]

    def _load(self, entry: CommitEntry) -> Sample:
        try:
            return read_sample(self._reader, self._reader.manifest(entry), self._verify)
        except MissingFragment:
            # Perhaps somebody has deleted the sample since we learnt of it.
            self._learn()
            if self._order.is_deleted(entry):
                raise _not_found(entry.sample_id, "is deleted") from None
            raise


def read_sample(reader: StoreReader, manifest: Manifest, verify: bool | None) -> Sample:
    """The sample of a manifest, put together and checked. Raises as `HiddenStatesDataset[key]`.

    `verify`: whether to compare checksums; None leaves it to the store, for samples that have any.
    """
    if verify is None:
        summed = all(each.checksum != NO_CHECKSUM for each in manifest.fragments)
        verify = reader.verifies_by_default and summed
    check_kind(reader.invariant, manifest)
    stages = []
    for fragment in manifest.fragments:
        stored = reader.fragment(manifest, fragment)
        if stored.input_ids is not None:
            check_tokens(manifest, fragment, stored.input_ids)
            input_ids = torch.frombuffer(stored.input_ids, dtype=torch.int64)
        stages.append(StageStates(fragment, stored))
    # Which fragment holds the token ids, and that just one does, was checked with the manifest.
    sample = Sample(manifest, stages, input_ids)
    if verify:
        sample.verify()
    return sample


def sample_failed(failure: Failure) -> SampleFailed:
    """What a failure is to whoever asks for the sample."""
    where = "" if failure.stage is None else f" on stage {failure.stage}"
    return SampleFailed(
        f"sample {failure.ref.sample_id!r} failed{where}: {failure.cause}: export it again",
        cause=failure.cause,
        sample_id=failure.ref.sample_id,
        stage=failure.stage,
    )


def _one_run(sample_id: str, entries: list[CommitEntry]) -> list[CommitEntry]:
    """These entries. Raises AmbiguousSample when they are of several runs."""
    runs = sorted({entry.run_id for entry in entries})
    if len(runs) > 1:
        raise AmbiguousSample(
            f"sample {sample_id!r} exists in the runs {', '.join(runs)}: "
            "open_dataset(..., run=...) keeps one",
            sample_id=sample_id,
        )
    return entries


def _not_found(sample_id: str, reason: str) -> SampleNotFound:
    return SampleNotFound(f"sample {sample_id!r} {reason}", sample_id=sample_id)
