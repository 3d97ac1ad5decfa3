"""A manifest is written and believed only if it agrees with itself."""

import hashlib
import json
import struct
from importlib import resources
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stagetap.errors import MalformedManifest, Refused, StageTapError, UnknownVersion
from stagetap.manifest import (
    DTYPE_ITEMSIZE,
    Fragment,
    Manifest,
    check_metadata,
    decode,
    encode,
    json_schema,
    token_digest,
    validate,
)
from stagetap.stores.base import SampleRef
from store_samples import manifest as make_manifest
from store_samples import owned, tapped

json_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=8), st.floats(-9, 9)
)
json_values = st.recursive(
    json_leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Any consistent manifest: uneven stages, stages without taps, any asked order, any dtype."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    pp_layers = [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    asked = draw(st.lists(st.integers(0, ends[-1]), min_size=1, max_size=6, unique=True))
    dtype = draw(st.sampled_from(sorted(DTYPE_ITEMSIZE)))
    tokens = draw(st.integers(1, 1000))
    hidden = draw(st.integers(1, 64))
    what = tapped(asked, pp_layers, num_hidden_layers=ends[-1], hidden_size=hidden, dtype=dtype)
    ref = SampleRef(run_id=draw(text), sample_id=draw(text), attempt=draw(text))
    fragments = consistent_fragments(what, tokens)
    metadata = draw(st.dictionaries(text, json_values, max_size=3))
    return make_manifest(what, ref, fragments, tokens, metadata=metadata)


text = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)


def consistent_fragments(what: Any, tokens: int) -> list[Fragment]:
    stages = [stage for stage in range(what.pp_size) if owned(what, stage)]
    fragments = []
    for stage in stages:
        layers = owned(what, stage)
        byte_size = tokens * len(layers) * what.hidden_size * DTYPE_ITEMSIZE[what.dtype]
        fragments.append(
            Fragment(
                stage=stage,
                layers=layers,
                path=f"run/sample/attempt/{stage}.safetensors",
                dtype=what.dtype,
                shape=(tokens, len(layers), what.hidden_size),
                byte_size=byte_size,
                checksum="xxh3_64:0123456789abcdef",
                file_bytes=byte_size + 500,
                input_ids=stage == stages[0],
            )
        )
    return fragments


def sample_manifest(**changes: Any) -> Manifest:
    what = tapped()
    ref = SampleRef(run_id="run", sample_id="s", attempt="a")
    return make_manifest(what, ref, consistent_fragments(what, 5), 5, **changes)


def document() -> dict[str, Any]:
    return json.loads(encode(sample_manifest()))


@settings(deadline=None, max_examples=50)
@given(manifests())
def test_what_is_written_is_read(manifest: Manifest) -> None:
    line = encode(manifest)
    assert b"\n" not in line
    assert decode(line) == manifest
    assert encode(decode(line)) == line
    jsonschema.validate(json.loads(line), json_schema())


def set_in(path: str, value: Any) -> Any:
    """A change to a document: set, or delete where value is `...`, what lies at `a.0.b`."""

    def change(doc: dict[str, Any]) -> None:
        *parents, last = [int(p) if p.isdigit() else p for p in path.split(".")]
        at: Any = doc
        for parent in parents:
            at = at[parent]
        if value is ...:
            del at[last]
        else:
            at[last] = value

    return change


HOSTILE = {
    "a missing field": set_in("token_count", ...),
    "a missing nested field": set_in("tapped.stream", ...),
    "an unknown field": set_in("extra", 1),
    "an unknown field of a fragment": set_in("fragments.0.extra", 1),
    "bool for a count": set_in("token_count", True),
    "float for a count": set_in("token_count", 5.5),
    "text for a count": set_in("token_count", "5"),
    "no tokens": set_in("token_count", 0),
    "a negative count": set_in("token_count", -5),
    "a count beyond 64 bits": set_in("token_count", 2**70),
    "other tokens than rows": set_in("token_count", 6),
    "a prompt longer than the sample": set_in("prompt_token_count", 6),
    "an empty sample id": set_in("sample_id", ""),
    "null for a sample id": set_in("sample_id", None),
    "no fragments": set_in("fragments", []),
    "a lost fragment": set_in("fragments.1", ...),
    "metadata that is no object": set_in("metadata", [1]),
    "a digest of another kind": set_in("token_digest", "md5:" + "0" * 32),
    "a digest cut short": set_in("token_digest", "sha256:00"),
    "an unknown checksum": set_in("fragments.0.checksum", "crc32:00000000"),
    "a time that is none": set_in("created_at", "yesterday"),
    "a time without zone": set_in("created_at", "2025-01-01T00:00:00.000000"),
    "a layer of no stage": set_in("tapped.layer_ids", [2, 0, 4, 6, 5]),
    "a layer asked twice": set_in("tapped.layer_ids", [2, 0, 4, 6, 6]),
    "a layer beyond the last": set_in("tapped.layer_ids", [2, 0, 4, 7]),
    "no layers": set_in("tapped.layer_ids", []),
    "a wrong role": set_in("fragments.0.layers.0.role", "last"),
    "the last layer as aux": set_in("fragments.1.layers.1.role", "aux"),
    "an unknown role": set_in("fragments.0.layers.0.role", "first"),
    "a layer stored twice": set_in("fragments.1.layers.0.id", 2),
    "descending layers": set_in(
        "fragments.0.layers",
        [
            {"id": 2, "role": "aux"},
            {"id": 0, "role": "aux"},
        ],
    ),
    "a fragment without layers": set_in("fragments.0.layers", []),
    "a stage twice": set_in("fragments.1.stage", 0),
    "a stage that does not exist": set_in("fragments.1.stage", 2),
    "a negative stage": set_in("fragments.0.stage", -1),
    "another dtype than the model's": set_in("fragments.0.dtype", "float32"),
    "an unknown dtype": set_in("tapped.dtype", "int7"),
    "a wrong row count": set_in("fragments.0.shape.0", 4),
    "a wrong column count": set_in("fragments.0.shape.1", 1),
    "a wrong hidden size": set_in("fragments.0.shape.2", 8),
    "two dimensions": set_in("fragments.0.shape", [5, 32]),
    "a wrong byte size": set_in("fragments.0.byte_size", 321),
    "a file smaller than its tensor": set_in("fragments.0.file_bytes", 10),
    "no input ids": set_in("fragments.0.input_ids", False),
    "input ids twice": set_in("fragments.1.input_ids", True),
    "an absolute path": set_in("fragments.0.path", "/etc/passwd"),
    "a path upwards": set_in("fragments.0.path", "a/../../b"),
    "a path to here": set_in("fragments.0.path", "./a"),
    "an empty path": set_in("fragments.0.path", ""),
    "a path with a hole": set_in("fragments.0.path", "a//b"),
    "a path to a directory": set_in("fragments.0.path", "a/b/"),
    "a path with a NUL": set_in("fragments.0.path", "a\0b"),
    "a path with a newline": set_in("fragments.0.path", "a\nb"),
    "a path of another system": set_in("fragments.0.path", "a\\..\\b"),
    "a part outside": set_in("fragments.0.parts", ["../b"]),
    "fewer stages than said": set_in("tapped.pp_size", 3),
    "stages with a gap": set_in("tapped.pp_layers", [[0, 3], [4, 6]]),
    "stages that end early": set_in("tapped.pp_layers", [[0, 3], [3, 5]]),
    "a stage that ends before it starts": set_in("tapped.pp_layers", [[0, 9], [9, 6]]),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_manifest_that_contradicts_itself_is_not_believed(change: Any) -> None:
    doc = document()
    decode(json.dumps(doc).encode())
    change(doc)
    with pytest.raises(MalformedManifest, match="manifest of sample"):
        decode(json.dumps(doc).encode())


@pytest.mark.parametrize("version", [0, 2, -1, 10**6])
def test_an_unknown_version_is_named_before_anything_else(version: int) -> None:
    line = json.dumps({"manifest_version": version, "sample_id": "s", "other": []}).encode()
    with pytest.raises(UnknownVersion, match=rf"manifest_version is {version}\b") as caught:
        decode(line)
    assert caught.value.sample_id == "s"
    whole = document() | {"manifest_version": version}
    with pytest.raises(UnknownVersion):
        decode(json.dumps(whole).encode())


@pytest.mark.parametrize("version", ["1", True, None, 1.5, [1]])
def test_a_version_of_another_type_is_malformed(version: Any) -> None:
    with pytest.raises(MalformedManifest):
        decode(json.dumps(document() | {"manifest_version": version}).encode())


@settings(deadline=None, max_examples=50)
@given(st.binary())
@example(b"")
@example(b"\xff\xfe")
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b'{"manifest_version":1,"metadata":' + b"[" * 100_000)
@example(b"null")
@example(b'{"manifest_version":1}')
@example(b'{"manifest_version":1e400}')
@example(b'{"manifest_version":' + b"9" * 5000 + b"}")
def test_bytes_of_any_kind_end_in_our_own_exceptions(line: bytes) -> None:
    with pytest.raises((MalformedManifest, UnknownVersion)):
        decode(line)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        (value.items() if isinstance(value, dict) else enumerate(value))
        if isinstance(value, dict | list)
        else ()
    )
    return [path] + [leaf for key, inner in items for leaf in leaves(inner, (*path, key))]


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_any_one_change_is_consistent_or_refused(data: st.DataObject) -> None:
    doc = document()
    *parents, last = data.draw(st.sampled_from(leaves(doc)[1:]))
    at: Any = doc
    for parent in parents:
        at = at[parent]
    at[last] = data.draw(json_values)
    try:
        manifest = decode(json.dumps(doc).encode())
    except StageTapError:
        return
    validate(manifest)
    encode(manifest)


def test_a_contradiction_is_not_written() -> None:
    manifest = sample_manifest()
    broken = msgspec.structs.replace(manifest, token_count=6)
    with pytest.raises(MalformedManifest, match="shape"):
        encode(broken)
    with pytest.raises(MalformedManifest):
        encode(msgspec.structs.replace(manifest, sample_id=""))
    with pytest.raises(MalformedManifest):
        encode(msgspec.structs.replace(manifest, token_count="5"))  # type: ignore[arg-type]
    with pytest.raises(MalformedManifest):
        encode(msgspec.structs.replace(manifest, sample_id="\ud800"))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_token_digest_is_over_int64_little_endian(ids: list[int]) -> None:
    expected = "sha256:" + hashlib.sha256(struct.pack(f"<{len(ids)}q", *ids)).hexdigest()
    assert token_digest(ids) == expected
    assert token_digest(np.array(ids, dtype=np.int64)) == expected
    assert token_digest(np.array(ids, dtype=">i8")) == expected


def test_token_digest_of_a_strided_array_is_that_of_its_values() -> None:
    assert token_digest(np.arange(10)[::2]) == token_digest([0, 2, 4, 6, 8])
    assert token_digest(np.array([1, 2], dtype=np.int32)) == token_digest([1, 2])


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), json_values))
def test_metadata_comes_back_as_it_was(metadata: dict[str, Any]) -> None:
    check_metadata(metadata)
    assert decode(encode(sample_manifest(metadata=metadata))).metadata == metadata


@pytest.mark.parametrize(
    "metadata",
    [
        [1],
        None,
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": (1, 2)},
        {1: 2},
        {"a": b"bytes"},
        {"a": object()},
        {"a": "\ud800"},
        {"a": "x" * 65536},
    ],
    ids=repr,
)
def test_metadata_that_would_not_come_back_is_refused(metadata: Any) -> None:
    with pytest.raises(Refused, match="metadata"):
        check_metadata(metadata)


def test_metadata_may_fill_its_bound() -> None:
    check_metadata({"a": "x" * (65536 - len('{"a":""}'))})
    with pytest.raises(Refused, match="65537"):
        check_metadata({"a": "x" * (65537 - len('{"a":""}'))})


def test_the_schema_in_the_package_is_current() -> None:
    stored = json.loads(resources.files("stagetap").joinpath("manifest.schema.json").read_text())
    assert stored == json_schema(), (
        "write json.dumps(stagetap.manifest.json_schema(), indent=2) to manifest.schema.json"
    )
    jsonschema.Draft202012Validator.check_schema(stored)


def test_the_schema_refuses_what_it_can_see() -> None:
    doc = document()
    jsonschema.validate(doc, json_schema())
    for name in ("a missing field", "an unknown field", "no tokens", "an unknown role"):
        broken = document()
        HOSTILE[name](broken)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, json_schema())
