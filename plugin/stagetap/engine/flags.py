"""``vllm serve --stagetap-layers 2,18,33 --stagetap-store URI``: flags for a connector config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stagetap.engine.refusal import announced
from stagetap.errors import Refused
from stagetap.layer_choice import HELP, check_choice, choose_layers, needs_model
from stagetap.options import CONNECTOR_NAME
from stagetap.wording import shortened, shown

if TYPE_CHECKING:
    import argparse


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The ``cli_args`` hook."""
    group = parser.add_argument_group(
        "StageTap", "Capture hidden states on every pipeline stage and publish them as samples."
    )
    group.add_argument(
        "--stagetap-layers",
        metavar="CHOICE",
        default=None,
        help=HELP,
    )
    group.add_argument(
        "--stagetap-store",
        metavar="URI",
        default=None,
        help="Where samples go: a directory shared by all stages, file:///directory, or "
        "mooncake://MASTER:PORT/RUN?OPTIONS.",
    )
    group.add_argument(
        "--stagetap-options",
        metavar="JSON",
        default=None,
        help="Further options of the connector as a JSON object, such as "
        '\'{"publish_timeout_s": 30, "export_default": "on"}\'.',
    )


def apply_flags(args: argparse.Namespace) -> None:
    """The ``parsed_args`` hook: turn the flags into ``--kv-transfer-config``.

    Raises:
        Refused: one flag without the other, a bad layer list, or both forms at once.
    """
    layers = getattr(args, "stagetap_layers", None)
    store = getattr(args, "stagetap_store", None)
    options = getattr(args, "stagetap_options", None)
    if layers is None and store is None and options is None:
        return
    with announced():
        if layers is None or store is None:
            missing = "--stagetap-layers" if layers is None else "--stagetap-store"
            raise Refused(
                f"{missing} is missing: --stagetap-layers and --stagetap-store go together"
            )
        if getattr(args, "kv_transfer_config", None) is not None:
            raise Refused(
                "--stagetap-layers and --kv-transfer-config exclude each other; put layers and "
                "store into kv_connector_extra_config instead"
            )
        check_choice(layers)
        chosen = layers if needs_model(layers) else choose_layers(layers, None)
        args.kv_transfer_config = kv_transfer_config(chosen, store, **further_options(options))


def further_options(text: str | None) -> dict[str, Any]:
    """What ``--stagetap-options`` says; names and types are checked with the other options."""
    try:
        options = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise Refused(
            f"--stagetap-options {shown(text)} is no JSON ({shortened(str(error))}); write it like "
            "'{\"publish_timeout_s\": 30}'"
        ) from None
    if not isinstance(options, dict):
        raise Refused("--stagetap-options must be a JSON object")
    if twice := sorted({"layers", "store"} & options.keys()):
        raise Refused(f"--stagetap-options: {twice[0]} has a flag of its own")
    return options


def kv_transfer_config(layers: str | Sequence[int], store: str, **options: Any) -> Any:
    """vLLM's ``KVTransferConfig`` for a StageTap engine, for ``LLM(kv_transfer_config=...)``.

    Layers are ids, or a choice as :mod:`stagetap.layer_choice` has them, which vLLM's finished
    configuration turns into ids. Further options are those of
    :class:`stagetap.options.ConnectorOptions`.
    """
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=CONNECTOR_NAME,
        kv_role="kv_producer",
        kv_connector_extra_config={
            "layers": layers if isinstance(layers, str) else list(layers),
            "store": store,
            **options,
        },
    )
