"""What `verify` says of a store, and how it looks at one sample, in whatever store."""

from dataclasses import dataclass, field

from stagetap.errors import SampleError, StageTapError
from stagetap.manifest import Manifest
from stagetap.stores.base import CommitEntry, StoreReader
from stagetap.stores.checks import check_kind, check_payload, check_tokens


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong; `kind` is the name of the exception that reading it raises."""

    kind: str
    message: str
    run_id: str | None = None
    sample_id: str | None = None
    stage: int | None = None


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """Something that no commit names: a path, or what keys begin with, relative to the store."""

    path: str
    size_bytes: int


@dataclass(kw_only=True)
class VerifyReport:
    """`samples` and `bytes` (hidden states alone) are of what is whole and counts.

    `duplicates`: commits of an id that has an earlier commit. `orphans`: attempts without a commit
    and other leftovers; those of `live_writers` may still be in flight. `swept_bytes` is None
    unless gc was asked for.
    """

    samples: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    duplicates: list[CommitEntry] = field(default_factory=list)
    orphans: list[Orphan] = field(default_factory=list)
    live_writers: list[str] = field(default_factory=list)
    swept_bytes: int | None = None

    def note(self, error: StageTapError, run_id: str, sample_id: str | None) -> None:
        """A sample is not whole, or what leads to it."""
        stage = error.stage if isinstance(error, SampleError) else None
        self.problems.append(
            Problem(
                kind=type(error).__name__,
                message=str(error),
                run_id=run_id,
                sample_id=sample_id,
                stage=stage,
            )
        )

    @property
    def ok(self) -> bool:
        """Whether every committed sample is whole. Duplicates and orphans harm nobody."""
        return not self.problems


def check_sample(
    reader: StoreReader, manifest: Manifest, checksums: bool, report: VerifyReport
) -> None:
    """Read all of a sample, and count it as whole. Raises as reading it does."""
    check_kind(reader.invariant, manifest)
    for fragment in manifest.fragments:
        stored = reader.fragment(manifest, fragment)
        if stored.input_ids is not None:
            check_tokens(manifest, fragment, stored.input_ids)
        if checksums:
            check_payload(manifest, fragment, stored.payload)
    report.samples += 1
    report.bytes += sum(fragment.byte_size for fragment in manifest.fragments)
