"""What kind of data a store or a sample holds, and whether two kinds are the same. Pure."""

import msgspec

from stagetap.errors import ForeignStore, Refused, UnknownVersion
from stagetap.manifest import Tapped
from stagetap.stores.base import STORE_VERSION, Invariant, KnownKind


class _Head(msgspec.Struct):
    store_version: int


def decode_invariant(document: bytes, where: str, cure: str) -> Invariant:
    """What a store says that it holds.

    Args:
        document: the JSON that stands there.
        where: names it in messages.
        cure: what to do when it is not ours.

    Raises:
        UnknownVersion: another version of StageTap wrote it.
        ForeignStore: it is nothing that StageTap writes.
    """
    try:
        head = msgspec.json.decode(document, type=_Head)
        if head.store_version != STORE_VERSION:
            raise UnknownVersion(
                f"{where}: store_version is {head.store_version}, this StageTap reads "
                f"{STORE_VERSION}: use the version that wrote it"
            )
        return msgspec.json.decode(document, type=Invariant)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ForeignStore(
            f"{where} was not written by StageTap or is damaged ({error}): {cure}", path=where
        ) from error


def kind_of(tapped: Tapped) -> Invariant:
    """The kind of data that was tapped."""
    return Invariant(
        weights_fingerprint=tapped.weights_fingerprint,
        layer_ids=tapped.layer_ids,
        stream=tapped.stream,
        dtype=tapped.dtype,
        id_convention=tapped.id_convention,
        hidden_size=tapped.hidden_size,
        num_hidden_layers=tapped.num_hidden_layers,
        engine_args=tapped.engine_args,
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


def check_known(stored: Invariant, known: KnownKind, where: str, instead: str) -> None:
    """Hold what a store has against what is known of an engine that has not started.

    Args:
        where: names the store in messages.
        instead: what else to give.

    Raises:
        Refused: they differ.
    """
    for field in known.__struct_fields__:
        ours, asked = getattr(stored, field), getattr(known, field)
        if asked is not None and asked != ours:
            raise Refused(
                f"{where} holds data with {field} {_show(ours)}, this engine would write "
                f"{_show(asked)}: ask for the same, or give {instead}"
            )


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
