"""Which keys the Mooncake store uses, and what lies under them. Pure.

    <run>/stagetap.json                          what must be equal for all writers of the run
    <run>/writers/<n>                            a committer: its id and its nonce
    <run>/index/<writer>.<seq>                   a page of the index: one commit, or one failure
    <run>/index/<writer>.mark<0|1>               how many pages this writer has at least
    <run>/<sample>/commit                        the manifest; it names its attempt
    <run>/<sample>/<attempt>/<stage>             a fragment that fits one slot
    <run>/<sample>/<attempt>/<stage>/<part>      one part of a larger one
    <run>/<sample>/<attempt>/<stage>/input_ids   int64 [T], with the lowest owning stage
    <run>/<sample>/<attempt>/error[.<stage>]     why the attempt failed
    <run>/<sample>/<attempt>/claim               which consumer takes the sample
    <run>/<sample>/<attempt>/ack.<consumer>      one of several consumers is done with it
    <run>/<sample>/<attempt>/deleted             what is left of the attempt is being removed

Mooncake cannot list keys, so whatever a reader has to find it must be able to count to: writers are
numbered, and so are the pages of each writer. A page holds one commit, not several: it is there
before the commit is reported, and no crash can lose a commit that somebody was told of.

Two kinds of keys never meet: sample, attempt and writer are single components (`stagetap.keys`),
which are never `commit`, `error` or `error.*`; a stage is digits; and the keys of a run that are
not below an attempt have three components, of which only a commit's last one is `commit`.
"""

from collections.abc import Sequence

from stagetap.keys import attempt_key, commit_key, component, error_key, fragment_key
from stagetap.manifest import Fragment, Manifest
from stagetap.stores.base import SampleRef

WRITER_WINDOW = 64
"""How many writer numbers are probed at once. Beyond so many that are gone none is looked for."""

MARK_EVERY = 64
"""After so many pages a writer says anew how many it has."""

PAGE_WINDOW = 2 * MARK_EVERY
"""How many pages are probed at once: more than can lie between a mark and the last page."""


def invariant_key(run_id: str) -> str:
    """Where a run says what kind of data it holds."""
    return f"{component(run_id)}/stagetap.json"


def writer_key(run_id: str, number: int) -> str:
    """Where the committer of this number introduces itself."""
    return f"{component(run_id)}/writers/{number}"


def page_key(run_id: str, writer: str, seq: int) -> str:
    """One page of a writer's index; `seq` counts from 0."""
    return f"{component(run_id)}/index/{component(writer)}.{seq}"


def mark_keys(run_id: str, writer: str) -> tuple[str, str]:
    """The two places in which a writer notes, in turn, how many pages it has."""
    prefix = f"{component(run_id)}/index/{component(writer)}.mark"
    return prefix + "0", prefix + "1"


def sample_commit_key(run_id: str, sample_id: str) -> str:
    """The object whose existence makes a sample visible."""
    return commit_key(run_id, sample_id)


def fragment_path(ref: SampleRef, stage: int) -> str:
    """The key of a fragment, or what the keys of its parts begin with."""
    return fragment_key(ref.run_id, ref.sample_id, ref.attempt, stage)


def part_key(path: str, number: int) -> str:
    """One part of the fragment at `path`; parts count from 0."""
    return f"{path}/{number}"


def input_ids_key(path: str) -> str:
    """The token ids beside the fragment at `path`."""
    return f"{path}/input_ids"


def error_record_key(ref: SampleRef, stage: int | None) -> str:
    """Why this attempt failed."""
    return error_key(ref.run_id, ref.sample_id, ref.attempt, stage)


def claim_key(ref: SampleRef) -> str:
    """Who takes this sample, of consumers that share a run."""
    return f"{_attempt(ref)}/claim"


def ack_key(ref: SampleRef, consumer: str) -> str:
    """That one of several consumers, all of which read the run, is done with this sample."""
    return f"{_attempt(ref)}/ack.{component(consumer)}"


def tombstone_key(ref: SampleRef) -> str:
    """That this attempt is being removed: who finds it must not read, and may go on removing."""
    return f"{_attempt(ref)}/deleted"


def payload_keys(fragment: Fragment) -> tuple[str, ...]:
    """The objects that hold the tensor of a fragment, in row order."""
    return fragment.parts or (fragment.path,)


def keys_of(manifest: Manifest) -> list[str]:
    """All objects that the stages have stored of a sample."""
    keys: list[str] = []
    for fragment in manifest.fragments:
        keys += payload_keys(fragment)
        if fragment.input_ids:
            keys.append(input_ids_key(fragment.path))
    return keys


def misplaced(manifest: Manifest, fragment: Fragment) -> str | None:
    """Why a fragment cannot be where its manifest says, or None. Guards against foreign keys."""
    path = fragment_path(ref_of(manifest), fragment.stage)
    if fragment.path != path:
        return f"it lies at {fragment.path}, not at {path}"
    expected = tuple(part_key(path, number) for number in range(len(fragment.parts)))
    if fragment.parts != expected:
        return f"its parts are not {path}/0 and so on"
    if len(fragment.parts) == 1:
        return "it has one part: a fragment that fits one object has none"
    return None


def ref_of(manifest: Manifest) -> SampleRef:
    """The attempt that a manifest is of."""
    return SampleRef(run_id=manifest.run_id, sample_id=manifest.sample_id, attempt=manifest.attempt)


def is_of_samples(run_id: str, key: str) -> bool:
    """Whether a key is of a run's samples, their pages and claims included, not of the run."""
    prefix = f"{component(run_id)}/"
    if not key.startswith(prefix) or key == invariant_key(run_id):
        return False
    place, _, rest = key.removeprefix(prefix).partition("/")
    if "/" in rest or rest == "commit":
        return True
    return place == "index" and rest.rpartition(".")[2].isdigit()


def part_sizes(byte_size: int, first_bytes: int, parts: int) -> tuple[int, ...] | None:
    """The sizes of all parts of a tensor of `byte_size` bytes, from the size of the first one.

    All are equal but the last, which holds the rest. None when so many parts of this size cannot
    make up the tensor.
    """
    if parts == 1:
        return (byte_size,) if first_bytes == byte_size else None
    last_bytes = byte_size - first_bytes * (parts - 1)
    if parts < 1 or not 0 < last_bytes <= first_bytes:
        return None
    return (*[first_bytes] * (parts - 1), last_bytes)


def next_position(exists: Sequence[bool]) -> tuple[list[int], int]:
    """What a probe of a window of pages says: which of them are there, and where to go on.

    A writer appends in order. So whatever precedes a page that exists was written, and, where it
    is not there any more, was consumed; behind the last one that exists nothing is known.
    """
    there = [offset for offset, found in enumerate(exists) if found]
    return there, there[-1] + 1 if there else 0


def log_name(writer: str, stretch: int) -> str:
    """What a reader calls the pages of a writer from page `stretch` on, up to the next gap.

    Readers that met other gaps, because they came later, name other logs: a position in the order
    of one of them is then refused by the others instead of meaning something else.
    """
    return f"{writer}@{stretch}"


def writer_of(name: str) -> str:
    """The writer in a `log_name`."""
    return name.rpartition("@")[0]


def _attempt(ref: SampleRef) -> str:
    return attempt_key(ref.run_id, ref.sample_id, ref.attempt)
