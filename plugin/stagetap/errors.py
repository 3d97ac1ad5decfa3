"""Exceptions that StageTap raises on purpose.

Every message names the thing that is wrong and what to do about it. All classes can be pickled and
can be built from the message alone, which is how a DataLoader passes a worker's exception on.
"""


class StageTapError(Exception):
    """Base class of every exception that StageTap raises on purpose."""

    def __str__(self) -> str:
        # KeyError, a base of some subclasses, would show the repr of the message instead.
        return str(self.args[0]) if self.args else ""


class Refused(StageTapError, ValueError):
    """What was asked cannot be honoured; the message says what is wrong and what to do."""


class DuplicateSample(Refused):
    """A commit already exists for this sample id in this run."""


class StoreError(StageTapError):
    """A store could not read or write; `path` names where, `size_bytes` how much, if known."""

    def __init__(
        self, message: str = "", *, path: str | None = None, size_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.size_bytes = size_bytes


class ForeignStore(StoreError):
    """There is no StageTap store at this address, or not one that this version can read."""


class CorruptLog(StoreError):
    """A line of a commit log that is not its torn last one cannot be read; `line` counts from 1."""

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        size_bytes: int | None = None,
        line: int | None = None,
    ) -> None:
        super().__init__(message, path=path, size_bytes=size_bytes)
        self.line = line


class NonFinite(StageTapError):
    """A hidden state that is to be stored is NaN or Inf, and such states shall not be."""


class SampleError(StageTapError):
    """Something is wrong with one sample; `stage` and `layer` are None where they do not apply."""

    def __init__(
        self,
        message: str = "",
        *,
        sample_id: str | None = None,
        stage: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(message)
        self.sample_id = sample_id
        self.stage = stage
        self.layer = layer


class MalformedManifest(SampleError):
    """A manifest is not JSON, lacks or misspells a field, or contradicts itself."""


class UnknownVersion(SampleError):
    """A manifest or a store is of a version that this StageTap does not know."""


class StreamMismatch(SampleError):
    """The stored stream kind is not the one that was asked for."""


class SampleNotFound(SampleError, KeyError):
    """No commit exists for this sample id, or the sample was deleted."""


class AmbiguousSample(SampleError, KeyError):
    """Several runs of this store hold a sample of this id."""


class LayerNotTapped(SampleError, KeyError):
    """The sample holds no such layer id."""


class MissingFragment(SampleError):
    """A fragment that the manifest names is not in the store."""


class TruncatedFragment(SampleError):
    """A fragment is shorter than the manifest says."""


class ChecksumMismatch(SampleError):
    """The bytes of a fragment are not the ones that were written."""


class TokenMismatch(SampleError):
    """The stored token ids are not those whose digest the manifest holds."""


class ForeignFile(SampleError):
    """What lies in a fragment's place is not that fragment."""


class SampleTimeout(SampleError, TimeoutError):
    """No commit appeared within the time that was given."""


class SampleFailed(SampleError):
    """Every attempt at this sample so far has failed; `cause` is what the engine recorded."""

    def __init__(
        self,
        message: str = "",
        *,
        cause: str = "",
        sample_id: str | None = None,
        stage: int | None = None,
        layer: int | None = None,
    ) -> None:
        super().__init__(message, sample_id=sample_id, stage=stage, layer=layer)
        self.cause = cause
