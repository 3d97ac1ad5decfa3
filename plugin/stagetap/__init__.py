"""Exact hidden states out of pipeline-parallel vLLM, as datasets.

What a trainer imports: `open_dataset`, `consume`, `Sample` and the exceptions. None of it needs
vLLM, and torch is imported by the first use of the reader.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stagetap.errors import (
    AmbiguousSample,
    ChecksumMismatch,
    CorruptLog,
    DuplicateSample,
    ForeignFile,
    ForeignStore,
    LayerNotTapped,
    MalformedManifest,
    MissingFragment,
    Refused,
    SampleError,
    SampleFailed,
    SampleNotFound,
    SampleTimeout,
    StageTapError,
    StoreError,
    StreamMismatch,
    TokenMismatch,
    TruncatedFragment,
    UnknownVersion,
)

if TYPE_CHECKING:
    from stagetap.reader.dataset import HiddenStatesDataset, open_dataset
    from stagetap.reader.online import OnlineStream, consume
    from stagetap.reader.sample import Sample

__version__ = "0.1.0"

__all__ = [
    "AmbiguousSample",
    "ChecksumMismatch",
    "CorruptLog",
    "DuplicateSample",
    "ForeignFile",
    "ForeignStore",
    "HiddenStatesDataset",
    "LayerNotTapped",
    "MalformedManifest",
    "MissingFragment",
    "OnlineStream",
    "Refused",
    "Sample",
    "SampleError",
    "SampleFailed",
    "SampleNotFound",
    "SampleTimeout",
    "StageTapError",
    "StoreError",
    "StreamMismatch",
    "TokenMismatch",
    "TruncatedFragment",
    "UnknownVersion",
    "consume",
    "open_dataset",
]

_LAZY = {
    "HiddenStatesDataset": "stagetap.reader.dataset",
    "OnlineStream": "stagetap.reader.online",
    "Sample": "stagetap.reader.sample",
    "consume": "stagetap.reader.online",
    "open_dataset": "stagetap.reader.dataset",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'stagetap' has no attribute {name!r}")
