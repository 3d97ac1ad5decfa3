"""What kind of data a store or a sample holds, and whether two kinds are the same. Pure."""

from stagetap.manifest import Manifest
from stagetap.stores.base import Invariant


def kind_of(manifest: Manifest) -> Invariant:
    """The kind of data that a manifest describes."""
    tapped = manifest.tapped
    return Invariant(
        weights_fingerprint=tapped.weights_fingerprint,
        layer_ids=tapped.layer_ids,
        stream=tapped.stream,
        dtype=tapped.dtype,
        id_convention=tapped.id_convention,
        hidden_size=tapped.hidden_size,
        num_hidden_layers=tapped.num_hidden_layers,
    )


def difference(stored: Invariant, other: Invariant) -> tuple[str, str, str] | None:
    """The first field in which two kinds differ, with both values as text, or None."""
    if stored == other:
        return None
    for field in stored.__struct_fields__:
        ours, theirs = getattr(stored, field), getattr(other, field)
        if ours != theirs:
            return field, _show(ours), _show(theirs)
    return None


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
