"""Where the file store keeps things, and the bytes at the head of a fragment. Pure.

    DIR/stagetap.json                                   what must be equal for all writers
    DIR/commits/<writer>.jsonl                          one line a commit
    DIR/deletes/<writer>.jsonl                          one line a deletion
    DIR/jobs/<run>.json                                 what `stagetap capture` was asked for
    DIR/nonces/<nonce>                                  proof that all processes share DIR
    DIR/<run>/<sample>/<attempt>/<stage>.safetensors    a fragment
    DIR/<run>/<sample>/<attempt>/error.<stage>.json     why an attempt failed

A fragment is a plain safetensors file: `input_ids` (int64 [T], on the lowest owning stage) and
`hidden_states` [T, L_stage, H], with the header padded so that `hidden_states` starts on a
multiple of 64 bytes. Its metadata says which fragment it is.
"""

import re

import msgspec

from stagetap.errors import StageTapError
from stagetap.keys import attempt_key, error_key, fragment_key
from stagetap.manifest import DTYPE_ITEMSIZE, SAFETENSORS_DTYPE, Layer
from stagetap.stores.base import SampleRef

INVARIANT_NAME = "stagetap.json"
COMMITS = "commits"
DELETES = "deletes"
JOBS = "jobs"
NONCES = "nonces"
LOG_SUFFIX = ".jsonl"
FRAGMENT_SUFFIX = ".safetensors"
# What lies at the top beside the runs.
TOP_LEVEL = frozenset({INVARIANT_NAME, COMMITS, DELETES, JOBS, NONCES})

_FRAGMENT_NAME = re.compile(r"\d+\.safetensors")
_ERROR_NAME = re.compile(r"error(\.\d+)?\.json")
_ALIGNMENT_BYTES = 64
_LENGTH_BYTES = 8


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor in a safetensors header; offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FragmentHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The safetensors header of a fragment."""

    hidden_states: TensorEntry
    metadata: dict[str, str] = msgspec.field(name="__metadata__")
    input_ids: TensorEntry | None = None


class NotAFragment(StageTapError):
    """Bytes that are not the beginning of a fragment."""


_decode_head = msgspec.json.Decoder(FragmentHead).decode


def attempt_path(ref: SampleRef) -> str:
    """The directory of an attempt, relative to the store."""
    return attempt_key(ref.run_id, ref.sample_id, ref.attempt)


def fragment_path(ref: SampleRef, stage: int) -> str:
    """The file of a fragment, relative to the store."""
    return fragment_key(ref.run_id, ref.sample_id, ref.attempt, stage) + FRAGMENT_SUFFIX


def error_path(ref: SampleRef, stage: int | None) -> str:
    """The file of an error record, relative to the store."""
    return error_key(ref.run_id, ref.sample_id, ref.attempt, stage) + ".json"


def is_error_record(name: str) -> bool:
    """Whether a file name in an attempt's directory is that of an error record."""
    return _ERROR_NAME.fullmatch(name) is not None


def is_fragment(name: str) -> bool:
    """Whether a file name in an attempt's directory is that of a fragment."""
    return _FRAGMENT_NAME.fullmatch(name) is not None


def head_of(
    ref: SampleRef,
    stage: int,
    layers: tuple[Layer, ...],
    dtype: str,
    shape: tuple[int, int, int],
    with_input_ids: bool,
) -> FragmentHead:
    """The header of this fragment. It says which one it is, so that no other file passes for it."""
    tokens, columns, hidden = shape
    ids_bytes = 8 * tokens if with_input_ids else 0
    end = ids_bytes + tokens * columns * hidden * DTYPE_ITEMSIZE[dtype]
    return FragmentHead(
        hidden_states=TensorEntry(SAFETENSORS_DTYPE[dtype], shape, (ids_bytes, end)),
        metadata={
            "stagetap": "1",
            "run_id": ref.run_id,
            "sample_id": ref.sample_id,
            "attempt": ref.attempt,
            "stage": str(stage),
            "layers": ",".join([f"{layer.id}:{layer.role}" for layer in layers]),
        },
        input_ids=TensorEntry("I64", (tokens,), (0, ids_bytes)) if with_input_ids else None,
    )


def encode_head(head: FragmentHead) -> bytes:
    """All that precedes the first tensor of a fragment: length and padded JSON."""
    text = msgspec.json.encode(head)
    payload_start = _LENGTH_BYTES + len(text) + head.hidden_states.data_offsets[0]
    text += b" " * (-payload_start % _ALIGNMENT_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def decode_head(file: memoryview) -> tuple[FragmentHead, int]:
    """The header of a whole fragment file, and where the tensors begin in it.

    Raises NotAFragment.
    """
    start = _LENGTH_BYTES + int.from_bytes(file[:_LENGTH_BYTES], "little")
    if start > len(file):
        raise NotAFragment("its header is longer than the file")
    try:
        head = _decode_head(file[_LENGTH_BYTES:start])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise NotAFragment(f"its header cannot be read ({error})") from error
    return head, start
