"""Pure: the rotary parameters of a K3 draft's config.json, from every way to write them down."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import RopeFields, check_rope_fields

ROPE_THETA = 50_000.0
"""The base when none is given, as in vLLM's configuration of this draft; transformers has 10000."""

_DEFAULT_KEYS = frozenset({"rope_type", "rope_theta"})
_YARN_KEYS = frozenset(RopeFields.__annotations__)


def rope_parameters(
    parameters: Mapping[str, Any] | None,
    scaling: Mapping[str, Any] | None = None,
    theta: float | None = None,
) -> dict[str, Any]:
    """One dictionary with ``rope_type`` and ``rope_theta``, which every reader takes alike.

    Args:
        parameters: ``rope_parameters``, as transformers 5 writes it.
        scaling: ``rope_scaling``, as transformers 4 wrote it; may say ``type`` for ``rope_type``.
        theta: ``rope_theta`` at the top level; a base inside of a dictionary wins, as it does in
            transformers and vLLM.

    Raises:
        ValueError: the two dictionaries contradict each other, hold a value that cannot be, or say
            what trainer and server would not understand alike.
    """
    merged: dict[str, Any] = {}
    for given in (parameters, scaling):
        for key, value in _one_spelling(given or {}).items():
            if key in merged and merged[key] != value:
                raise ValueError(
                    f"{key} is {merged[key]!r} in rope_parameters and {value!r} in rope_scaling; "
                    "keep rope_parameters alone"
                )
            merged[key] = value
    merged.setdefault("rope_type", "default")
    merged.setdefault("rope_theta", ROPE_THETA if theta is None else theta)
    _check(merged)
    return merged


def _one_spelling(given: Mapping[str, Any]) -> dict[str, Any]:
    """``type`` is the older name of ``rope_type``."""
    spelled = {key: value for key, value in given.items() if value is not None}
    if "type" in spelled:
        older = spelled.pop("type")
        if spelled.setdefault("rope_type", older) != older:
            raise ValueError(
                f"rope type {older!r} in `type` and {spelled['rope_type']!r} in `rope_type`; "
                "keep `rope_type` alone"
            )
    return spelled


def _check(merged: Mapping[str, Any]) -> None:
    check_rope_fields(merged)
    kind = merged["rope_type"]
    allowed = {"default": _DEFAULT_KEYS, "yarn": _YARN_KEYS}.get(kind)
    if allowed is None:
        raise ValueError(
            f"rope_type {kind!r} is not built for a K3 draft (vLLM would take it for YaRN); "
            "use 'default' or 'yarn'"
        )
    unknown = sorted(set(merged) - allowed)
    if unknown:
        raise ValueError(
            f"rope_parameters has {', '.join(unknown)}, which a K3 draft with rope_type {kind!r} "
            "does not use; remove it"
        )
    if kind == "yarn":
        missing = sorted({"factor", "original_max_position_embeddings"} - set(merged))
        if missing:
            raise ValueError(f"rope_parameters of rope_type 'yarn' lacks {', '.join(missing)}")
        if ("mscale" in merged) != ("mscale_all_dim" in merged):
            raise ValueError(
                "rope_parameters has one of mscale and mscale_all_dim, which vLLM and transformers "
                "do not understand alike; give both or neither"
            )
