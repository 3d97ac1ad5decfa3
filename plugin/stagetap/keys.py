"""Names: any sample id becomes a safe, distinct, bounded part of a key or file name.

Pure. A name keeps letters, digits, `.`, `_` and `-`; every other byte of the UTF-8 text becomes
`%XX`. Names that would be hidden (a leading dot) or that a store uses for itself get their first
byte escaped as well. What would grow beyond `MAX_COMPONENT_BYTES` is cut and ends in `~` and the
sha256 of the text; no short name contains `~`, so the two forms cannot meet.
"""

import hashlib
import re

from stagetap.errors import Refused

MAX_COMPONENT_BYTES = 120

# What a store keeps beside runs, samples and attempts.
RESERVED = frozenset({"commit", "commits", "deletes", "error", "jobs", "nonces", "stagetap.json"})

_SAFE = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_ENCODED = [chr(byte) if byte in _SAFE else f"%{byte:02X}" for byte in range(256)]
_KEPT_OF_LONG = 48
_CUT_ESCAPE = re.compile(r"%[0-9A-F]?\Z")


def component(text: str) -> str:
    """The name of `text` as one part of a key: ASCII, at most 120 bytes, distinct per text.

    Raises Refused for an empty text and for one that is not valid Unicode (a lone surrogate).
    """
    if not text:
        raise Refused("an empty id cannot name anything: give at least one character")
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Refused(
            f"id {text!r} holds a lone surrogate at position {error.start}: give valid Unicode"
        ) from None
    name = "".join([_ENCODED[byte] for byte in raw])
    if name.startswith((".", "error.")) or name in RESERVED:
        name = f"%{raw[0]:02X}{name[1:]}"
    if len(name) > MAX_COMPONENT_BYTES:
        kept = _CUT_ESCAPE.sub("", name[:_KEPT_OF_LONG])
        name = f"{kept}~{hashlib.sha256(raw).hexdigest()}"
    return name


def attempt_key(run_id: str, sample_id: str, attempt: str) -> str:
    """`<run>/<sample>/<attempt>`: what lies under it belongs to one try at one sample."""
    return f"{component(run_id)}/{component(sample_id)}/{component(attempt)}"


def fragment_key(run_id: str, sample_id: str, attempt: str, stage: int) -> str:
    """`<run>/<sample>/<attempt>/<stage>`: what one stage stores of one attempt."""
    return f"{attempt_key(run_id, sample_id, attempt)}/{_stage(stage)}"


def error_key(run_id: str, sample_id: str, attempt: str, stage: int | None) -> str:
    """`<run>/<sample>/<attempt>/error.<stage>`, or `.../error` for a failure of no one stage."""
    suffix = "" if stage is None else f".{_stage(stage)}"
    return f"{attempt_key(run_id, sample_id, attempt)}/error{suffix}"


def commit_key(run_id: str, sample_id: str) -> str:
    """`<run>/<sample>/commit`: the object whose existence makes a sample visible."""
    return f"{component(run_id)}/{component(sample_id)}/commit"


def _stage(stage: int) -> str:
    if stage < 0:
        raise Refused(f"stage {stage} cannot name a fragment: pipeline ranks start at 0")
    return str(stage)
