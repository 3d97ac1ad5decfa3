"""`stagetap.json`: the one file that says what kind of data a store holds."""

import os

import msgspec

from stagetap.errors import ForeignStore, Refused
from stagetap.stores.base import Invariant, KnownKind
from stagetap.stores.file_io import (
    SCRATCH_PREFIX,
    fsync_directory,
    listed,
    naming,
    remove_if_there,
    scratch_path,
    write_scratch,
)
from stagetap.stores.file_layout import COMMITS, DELETES, INVARIANT_NAME, JOBS, NONCES
from stagetap.stores.kind import check_known, decode_invariant, difference

# A fresh file system brings the first one along; the others a start that was killed leaves behind.
_HARMLESS = frozenset({"lost+found", COMMITS, DELETES, JOBS, NONCES})


def read_invariant(root: str) -> Invariant:
    """What the store at `root` holds. Raises ForeignStore, UnknownVersion or StoreError."""
    path = os.path.join(root, INVARIANT_NAME)
    with naming("read", path):
        try:
            with open(path, "rb") as file:
                text = file.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ForeignStore(
                f"{root} is no StageTap store, it has no {INVARIANT_NAME}: give the directory "
                "that a capture wrote to",
                path=root,
            ) from error
    return decode_invariant(text, path, "restore it or give another directory")


def is_claimed(root: str) -> bool:
    """Whether the directory holds a store. Raises Refused when it holds something else instead."""
    if os.path.lexists(os.path.join(root, INVARIANT_NAME)):
        return True
    _refuse_foreign_directory(root)
    return False


def check_usable(root: str, known: KnownKind) -> None:
    """Refuse a directory that no engine with such data could use. Creates nothing.

    For the seconds before an engine starts; `claim` has the last word once it is there.
    Raises Refused, ForeignStore, UnknownVersion or StoreError.
    """
    if os.path.lexists(root) and not os.path.isdir(root):
        raise Refused(f"{root} is no directory: give a new or an empty one")
    if is_claimed(root):
        check_known(read_invariant(root), known, root, "another directory")


def claim(root: str, invariant: Invariant) -> None:
    """Create `stagetap.json` and the directories beside it, or find one that says the same.

    Raises Refused when the directory holds other data, StoreError when it cannot be written.
    """
    path = os.path.join(root, INVARIANT_NAME)
    if not is_claimed(root):
        # Before the file: a store without its logs is damaged, and not merely empty.
        for name in (COMMITS, DELETES, NONCES):
            with naming("create", os.path.join(root, name)):
                os.makedirs(os.path.join(root, name), exist_ok=True)
        _create_exclusively(root, path, invariant)
    found = difference(read_invariant(root), invariant)
    if found is not None:
        field, ours, theirs = found
        raise Refused(
            f"{root} holds data with {field} {ours}, this engine would write {theirs}: give "
            "another directory"
        )


def _refuse_foreign_directory(root: str) -> None:
    others = [
        name
        for name in listed(root)
        if not name.startswith(SCRATCH_PREFIX) and name not in _HARMLESS
    ]
    # Another engine may have claimed the directory since we looked for its file.
    if others and INVARIANT_NAME not in others:
        raise Refused(
            f"{root} holds other things ({others[0]}) and no {INVARIANT_NAME}: give a new or an "
            "empty directory"
        )


def _create_exclusively(root: str, path: str, invariant: Invariant) -> None:
    """Put the whole file in place at once; that somebody else was faster is no error."""
    text = msgspec.json.format(msgspec.json.encode(invariant), indent=2) + b"\n"
    scratch = scratch_path(root, INVARIANT_NAME)
    with naming("write", path, len(text)):
        try:
            write_scratch(scratch, text)
            os.link(scratch, path)
            fsync_directory(root)
        except FileExistsError:
            return
        finally:
            remove_if_there(scratch)
