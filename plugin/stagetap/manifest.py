"""The manifest: everything a reader needs to know about one attempt at one sample.

Pure: neither torch nor vLLM. `encode` and `decode` are the only way in and out, and both validate,
so that a manifest that contradicts itself is neither written nor believed.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from stagetap.errors import MalformedManifest, Refused, UnknownVersion

MANIFEST_VERSION = 1
MAX_METADATA_BYTES = 64 * 1024

NO_CHECKSUM = "none"
"""Stands for the checksum of a fragment that was captured without one."""

# Bytes per element of what can be stored, and the name of the type in a safetensors header.
DTYPE_ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
SAFETENSORS_DTYPE = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}

# A relative path of named parts: none of them empty, `.` or `..`.
_INSIDE_STORE = re.compile(
    r"(?!\.{1,2}(?:/|$))[^/\\\x00-\x1f]+(?:/(?!\.{1,2}(?:/|$))[^/\\\x00-\x1f]+)*"
)

Role = Literal["aux", "last"]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Sha256 = Annotated[str, msgspec.Meta(pattern=r"^sha256:[0-9a-f]{64}$")]
_Checksum = Annotated[str, msgspec.Meta(pattern=r"^(xxh3_64:[0-9a-f]{16}|none)$")]
_Moment = Annotated[
    str,
    msgspec.Meta(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}(Z|\+00:00)$"),
]


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One column of a fragment. `id` k is the residual stream after decoder layer k-1 ran."""

    id: _Count
    role: Role


class Fragment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one owning stage stores of a sample: one tensor [T, L_stage, H].

    `layers` names axis 1, ascending. `path` and `parts` are relative to the store, with `/`.
    `byte_size` and `checksum` are of the tensor's bytes alone, in row order; the checksum is `none`
    when none was taken. `file_bytes` is the size of the whole file or object where there is one.
    `input_ids` says whether the token ids (int64 [T]) are stored beside the tensor.
    """

    stage: _Count
    layers: tuple[Layer, ...]
    path: _Text
    dtype: str
    shape: tuple[_Positive, _Positive, _Positive]
    byte_size: _Positive
    checksum: _Checksum
    file_bytes: _Positive | None
    parts: tuple[_Text, ...] = ()
    input_ids: bool


class Tapped(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was tapped, and of which model. `layer_ids` is in asked order, N included if asked.

    `pp_layers` holds [start, end) of the decoder layers of every stage. `engine_args` are those of
    the engine's arguments that change what a model computes, as text, where they were given.
    """

    model: _Text
    weights_fingerprint: _Text
    weight_version: str
    adapter: str | None
    stream: _Text
    norm_state: _Text
    id_convention: _Text
    layer_ids: tuple[_Count, ...]
    num_hidden_layers: _Positive
    hidden_size: _Positive
    vllm_version: _Text
    series_digest: _Text
    pp_size: _Positive
    tp_size: _Positive
    pp_layers: tuple[tuple[_Count, _Count], ...]
    kv_cache_dtype: _Text
    dtype: str
    engine_args: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The record of one attempt. `token_count` is T, the rows of every fragment.

    `created_at` is ISO 8601 in UTC with microseconds; `metadata` is the user's own JSON.
    """

    manifest_version: int
    sample_id: _Text
    run_id: _Text
    attempt: _Text
    token_count: _Positive
    prompt_token_count: _Positive
    token_digest: _Sha256
    fragments: tuple[Fragment, ...]
    tapped: Tapped
    created_at: _Moment
    metadata: dict[str, Any] = {}


class _Head(msgspec.Struct):
    manifest_version: int
    sample_id: str | None = None


_decode_head = msgspec.json.Decoder(_Head).decode
_decode_manifest = msgspec.json.Decoder(Manifest).decode
_encode_json = msgspec.json.Encoder().encode


def token_digest(ids: Sequence[int] | np.ndarray) -> str:
    """`sha256:<hex>` over the token ids as int64, little-endian."""
    data = np.ascontiguousarray(ids, dtype="<i8").data
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def encode(manifest: Manifest) -> bytes:
    """One line of JSON without its newline.

    Raises MalformedManifest when the manifest contradicts itself, Refused when its metadata cannot
    be JSON.
    """
    check_metadata(manifest.metadata)
    try:
        line = _encode_json(manifest)
        _decode_manifest(line)
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError) as error:
        raise _malformed(manifest.sample_id, str(error)) from error
    validate(manifest)
    return line


def decode(line: bytes | msgspec.Raw) -> Manifest:
    """The manifest of one JSON document.

    Raises UnknownVersion, whatever else such a document holds, or MalformedManifest; nothing else.
    """
    try:
        manifest = _decode_manifest(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise _undecodable(line, error) from error
    if manifest.manifest_version != MANIFEST_VERSION:
        raise _unknown_version(manifest.manifest_version, manifest.sample_id)
    validate(manifest)
    return manifest


def check_metadata(metadata: object) -> None:
    """Raise Refused unless `metadata` is a JSON object, of at most 64 KiB, that JSON preserves.

    What JSON would change on the way (NaN, tuples, keys that are no strings) is refused: the reader
    must give back what was handed in.
    """
    if not isinstance(metadata, dict):
        raise Refused(f"metadata must be a JSON object, not {type(metadata).__name__}")
    try:
        text = _encode_json(metadata)
        same = msgspec.json.decode(text) == metadata
    except (msgspec.MsgspecError, UnicodeError, TypeError, ValueError, RecursionError) as error:
        raise Refused(f"metadata cannot be written as JSON: {error}") from error
    if not same:
        raise Refused(
            "metadata does not survive JSON (NaN, infinity, tuples, keys that are no strings): "
            "use plain JSON values"
        )
    if (number := _wide_integer(metadata)) is not None:
        raise Refused(f"metadata: {number} does not fit 64 bits: write it as a string")
    if len(text) > MAX_METADATA_BYTES:
        raise Refused(
            f"metadata is {len(text)} bytes of JSON, at most {MAX_METADATA_BYTES} are kept: "
            "store it elsewhere and put its address here"
        )


def _wide_integer(value: object) -> int | None:
    """An integer somewhere in a JSON value that vLLM's messages cannot carry, if there is one."""
    rest = [value]  # no recursion: what msgspec could nest may be deeper than Python's stack
    for each in rest:
        if isinstance(each, int) and not -(2**63) <= each < 2**63:
            return each
        if isinstance(each, dict | list):
            rest.extend(each.values() if isinstance(each, dict) else each)
    return None


def validate(manifest: Manifest) -> None:
    """Raise MalformedManifest unless the manifest agrees with itself in every number."""
    problem = _problem_of_counts(manifest) or _problem_of_taps(manifest.tapped)
    for fragment in manifest.fragments:
        problem = problem or _problem_of_fragment(manifest, fragment)
    problem = problem or _problem_of_whole(manifest)
    if problem:
        raise _malformed(manifest.sample_id, problem)


def sample_bytes(token_count: int, layers: int, hidden_size: int, itemsize: int) -> int:
    """Bytes of a sample: the states of all stages, and the token ids."""
    return token_count * (layers * hidden_size * itemsize + 8)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a manifest, as kept in `stagetap/manifest.schema.json`."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"StageTap manifest, version {MANIFEST_VERSION}",
        **msgspec.json.schema(Manifest),
    }
    # Default values come as tuples, which JSON has not.
    return dict(msgspec.json.decode(_encode_json(schema)))


def _problem_of_counts(manifest: Manifest) -> str | None:
    if manifest.manifest_version != MANIFEST_VERSION:
        return f"manifest_version is {manifest.manifest_version}, not {MANIFEST_VERSION}"
    if manifest.prompt_token_count > manifest.token_count:
        return (
            f"prompt_token_count {manifest.prompt_token_count} exceeds "
            f"token_count {manifest.token_count}"
        )
    return None


def _problem_of_taps(tapped: Tapped) -> str | None:
    ids, last = tapped.layer_ids, tapped.num_hidden_layers
    if not ids:
        return "tapped.layer_ids is empty"
    if len(set(ids)) != len(ids):
        return f"tapped.layer_ids {list(ids)} holds a duplicate"
    if max(ids) > last:
        return f"tapped.layer_ids {list(ids)} holds {max(ids)}, the model has {last} layers"
    if tapped.dtype not in DTYPE_ITEMSIZE:
        return f"tapped.dtype is {tapped.dtype!r}, not one of {', '.join(DTYPE_ITEMSIZE)}"
    if len(tapped.pp_layers) != tapped.pp_size:
        return f"tapped.pp_layers names {len(tapped.pp_layers)} stages of {tapped.pp_size}"
    expected_start = 0
    for stage, (start, end) in enumerate(tapped.pp_layers):
        if start != expected_start or end < start:
            return f"tapped.pp_layers of stage {stage} is [{start}, {end})"
        expected_start = end
    if expected_start != last:
        return f"tapped.pp_layers ends at {expected_start}, the model has {last} layers"
    return None


def _problem_of_fragment(manifest: Manifest, fragment: Fragment) -> str | None:
    tapped = manifest.tapped
    where = f"fragment of stage {fragment.stage}"
    if fragment.stage >= tapped.pp_size:
        return f"{where}: there are {tapped.pp_size} stages"
    ids = [layer.id for layer in fragment.layers]
    if ids != sorted(set(ids)) or not ids:
        return f"{where}: layers {ids} do not ascend"
    for layer in fragment.layers:
        role = "last" if layer.id == tapped.num_hidden_layers else "aux"
        if layer.role != role:
            return f"{where}: layer {layer.id} has role {layer.role!r}, not {role!r}"
    shape = (manifest.token_count, len(ids), tapped.hidden_size)
    if fragment.shape != shape:
        return f"{where}: shape is {list(fragment.shape)}, not {list(shape)}"
    if fragment.dtype != tapped.dtype:
        return f"{where}: dtype is {fragment.dtype!r}, not {tapped.dtype!r}"
    size_bytes = shape[0] * shape[1] * shape[2] * DTYPE_ITEMSIZE[fragment.dtype]
    if fragment.byte_size != size_bytes:
        return f"{where}: byte_size is {fragment.byte_size}, the shape says {size_bytes}"
    if fragment.file_bytes is not None and fragment.file_bytes < fragment.byte_size:
        return f"{where}: file_bytes {fragment.file_bytes} is less than its {size_bytes} bytes"
    for path in (fragment.path, *fragment.parts):
        if not _INSIDE_STORE.fullmatch(path):
            return f"{where}: path {path!r} leaves the store"
    return None


def _problem_of_whole(manifest: Manifest) -> str | None:
    stored = sorted(layer.id for fragment in manifest.fragments for layer in fragment.layers)
    asked = sorted(manifest.tapped.layer_ids)
    if stored != asked:
        return f"the fragments hold layers {stored}, asked were {asked}"
    stages = [fragment.stage for fragment in manifest.fragments]
    if stages != sorted(set(stages)):
        return f"the fragments' stages {stages} do not ascend"
    holders = [fragment.stage for fragment in manifest.fragments if fragment.input_ids]
    if holders != stages[:1]:
        return f"input_ids are stored by stages {holders}, not by the lowest one, {stages[0]}"
    return None


def _undecodable(line: bytes | msgspec.Raw, error: Exception) -> MalformedManifest | UnknownVersion:
    """What to say of a line that is no manifest of this version: of another one, or of none?"""
    try:
        head = _decode_head(line)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _malformed(None, str(error))
    if head.manifest_version == MANIFEST_VERSION:
        return _malformed(head.sample_id, str(error))
    return _unknown_version(head.manifest_version, head.sample_id)


def _unknown_version(found: int, sample_id: str | None) -> UnknownVersion:
    return UnknownVersion(
        f"sample {sample_id!r}: manifest_version is {found}, this StageTap reads "
        f"{MANIFEST_VERSION}: read it with the version that wrote it",
        sample_id=sample_id,
    )


def _malformed(sample_id: str | None, problem: str) -> MalformedManifest:
    return MalformedManifest(
        f"manifest of sample {sample_id!r}: {problem}: it was not written by StageTap or was "
        "changed since; capture the sample again",
        sample_id=sample_id,
    )
