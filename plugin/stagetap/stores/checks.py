"""Is a stored fragment what its manifest says? The checks that readers and `verify` share."""

from typing import TypeVar

import numpy as np
import xxhash

from stagetap.errors import (
    ChecksumMismatch,
    ForeignFile,
    SampleError,
    StreamMismatch,
    TokenMismatch,
)
from stagetap.manifest import NO_CHECKSUM, Fragment, Manifest, token_digest
from stagetap.stores.base import Invariant
from stagetap.stores.kind import difference, kind_of

Error = TypeVar("Error", bound=SampleError)


def fragment_error(kind: type[Error], manifest: Manifest, fragment: Fragment, reason: str) -> Error:
    """An error of this kind that names sample, run, stage and layers before the reason."""
    layers = ", ".join(str(layer.id) for layer in fragment.layers)
    return kind(
        f"sample {manifest.sample_id!r} of run {manifest.run_id!r}, stage {fragment.stage} "
        f"(layers {layers}): {reason}",
        sample_id=manifest.sample_id,
        stage=fragment.stage,
        layer=fragment.layers[0].id,
    )


def check_kind(stored: Invariant, manifest: Manifest) -> None:
    """Raise StreamMismatch or ForeignFile unless the sample is of its store's kind."""
    found = difference(stored, kind_of(manifest.tapped))
    if found is None:
        return
    field, ours, theirs = found
    error = StreamMismatch if field == "stream" else ForeignFile
    raise error(
        f"sample {manifest.sample_id!r} of run {manifest.run_id!r}: {field} is {theirs}, its "
        f"store's is {ours}: the commit log was brought here from another store",
        sample_id=manifest.sample_id,
    )


def check_tokens(manifest: Manifest, fragment: Fragment, input_ids: memoryview) -> None:
    """Raise TokenMismatch unless these int64 bytes are the tokens of the manifest."""
    found = token_digest(np.frombuffer(input_ids, dtype="<i8"))
    if found != manifest.token_digest:
        raise fragment_error(
            TokenMismatch,
            manifest,
            fragment,
            f"the stored token ids digest to {found}, the manifest says {manifest.token_digest}: "
            "capture the sample again",
        )


def check_payload(manifest: Manifest, fragment: Fragment, payload: memoryview) -> None:
    """Raise ChecksumMismatch unless these are the bytes that were written.

    Also for a fragment without a checksum: that it is whole was asked for and cannot be said.
    """
    if fragment.checksum == NO_CHECKSUM:
        raise fragment_error(
            ChecksumMismatch,
            manifest,
            fragment,
            'it was captured with the connector option checksum="none", so its bytes cannot be '
            "verified: read it without verifying",
        )
    found = f"xxh3_64:{xxhash.xxh3_64_hexdigest(payload)}"
    if found != fragment.checksum:
        raise fragment_error(
            ChecksumMismatch,
            manifest,
            fragment,
            f"the bytes of {fragment.path} give {found}, the manifest says {fragment.checksum}: "
            "capture the sample again",
        )
