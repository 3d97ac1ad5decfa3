"""Typed options of the connector and of one request, and every message that refuses one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from stagetap.errors import Refused
from stagetap.keys import component
from stagetap.manifest import check_metadata
from stagetap.stores.mooncake_uri import format_uri, is_mooncake, parse_uri, with_run
from stagetap.taps import validate_layer_ids

CONNECTOR_NAME = "StageTapConnector"
"""The name under which the plugin registers its KV connector in vLLM."""

PARAMS_KEY = "stagetap"
"""The key inside a request's ``kv_transfer_params``."""

MAX_SAMPLE_ID_CHARS = 1024

Positive = Annotated[int, msgspec.Meta(gt=0)]


class ConnectorOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``kv_connector_extra_config`` of the StageTap connector.

    Attributes:
        layers: layer ids to capture, in the order in which the reader shall give them back. A
            choice such as ``eagle3`` (:mod:`stagetap.layer_choice`) may stand there in a
            configuration; the front end puts ids in its place before anybody reads this.
        store: where samples go: a directory, ``file:///directory`` or
            ``mooncake://MASTER:PORT/RUN``.
        run_id: the name under which this engine stores. When absent the one that a Mooncake
            address names, else generated at start.
        export_default: whether a request that says nothing exports.
        slots: number of staging buffers a stage holds. Each of `writer_threads` uses one at a time.
        slot_bytes: size of one staging buffer, in bytes. The time between two writes counts less,
            the larger they are.
        writer_threads: fragments that a stage writes at once.
        publish_timeout_s: seconds between the end of a request and its commit after which the
            sample fails.
        max_consecutive_failures: samples that fail in a row before exporting is suspended; 0
            never suspends it.
        on_nonfinite: whether a NaN or Inf in a tap fails the sample or is stored.
        checksum: over the bytes of each fragment; `none` takes none, and its readers cannot verify.
        direct_pages: `auto` stores rows straight from the pages of the cache where store and memory
            allow it; `off` copies all of them to a slot first.
    """

    layers: tuple[int, ...]
    store: str
    run_id: str | None = None
    export_default: Literal["on", "off"] = "off"
    slots: Positive = 4
    slot_bytes: Positive = 16 * 1024 * 1024
    writer_threads: Positive = 4
    publish_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 120.0
    max_consecutive_failures: Annotated[int, msgspec.Meta(ge=0)] = 16
    on_nonfinite: Literal["fail", "store"] = "fail"
    checksum: Literal["xxh3_64", "none"] = "xxh3_64"
    direct_pages: Literal["auto", "off"] = "auto"


class RequestOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``kv_transfer_params["stagetap"]`` of one request.

    Attributes:
        sample_id: name of the sample; generated when absent.
        export: whether this request exports; present and absent mean yes, ``False`` means no.
        include_output: rows for the output tokens too (prompt + output - 1).
        prefill_only: end the request when its prompt is done.
        completion: ``committed`` withholds the final output until the sample is readable,
            ``accepted`` does not.
        metadata: JSON kept with the sample, at most 64 KiB.
    """

    sample_id: str | None = None
    export: bool = True
    include_output: bool = False
    prefill_only: bool = False
    completion: Literal["committed", "accepted"] = "committed"
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)


def connector_options(extra_config: Mapping[str, Any]) -> ConnectorOptions:
    """Read and check the connector's options.

    Raises:
        Refused: an unknown, missing or ill-typed option, named.
    """
    options = _convert(extra_config, ConnectorOptions, "connector option")
    layers = validate_layer_ids(options.layers)
    for name in ("store", "run_id"):
        if getattr(options, name) == "":
            raise Refused(f"connector option {name} is empty")
    return msgspec.structs.replace(_with_one_run(options), layers=layers)


def _with_one_run(options: ConnectorOptions) -> ConnectorOptions:
    """A Mooncake address names its run, since workers find each other there: say it there too.

    Raises:
        Refused: the address and ``run_id`` name different runs, or none.
    """
    if not is_mooncake(options.store):
        return options
    address = parse_uri(options.store)
    run_id = options.run_id or address.run
    if run_id is None:
        raise Refused(
            f"connector option store: {options.store} names no run: write "
            f"mooncake://{address.master}/RUN, or set run_id"
        )
    store = format_uri(with_run(address, run_id))
    return msgspec.structs.replace(options, store=store, run_id=run_id)


def request_options(params: Any) -> RequestOptions:
    """Read and check the options of one request.

    Raises:
        Refused: an unknown key, a wrong type, or options that contradict each other, named.
    """
    options = _convert(params, RequestOptions, f"kv_transfer_params.{PARAMS_KEY}")
    where = f"kv_transfer_params.{PARAMS_KEY}"
    if options.sample_id is not None and not 0 < len(options.sample_id) <= MAX_SAMPLE_ID_CHARS:
        raise Refused(
            f"{where}.sample_id must have 1 to {MAX_SAMPLE_ID_CHARS} characters, "
            f"not {len(options.sample_id)}"
        )
    if options.prefill_only and options.include_output:
        raise Refused(f"{where}: prefill_only and include_output contradict each other; drop one")
    try:
        check_metadata(options.metadata)
        if options.sample_id is not None:
            component(options.sample_id)
    except Refused as error:
        raise Refused(f"{where}: {error}") from None
    return options


def _convert(data: Any, kind: type[Any], where: str) -> Any:
    """Convert strictly; say which field is wrong and, for an unknown one, which exist."""
    if not isinstance(data, Mapping):
        raise Refused(f"{where} must be an object, not {type(data).__name__}")
    names = kind.__struct_fields__
    unknown = sorted(str(key) for key in data if key not in names)
    if unknown:
        raise Refused(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(names)}")
    values = dict(data)
    if "layers" in names and "layers" in values:
        # Checked by the tap rules, whose messages say what a layer id is.
        values["layers"] = validate_layer_ids(values["layers"])
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise Refused(f"{where}: {_readable(str(error))}") from None


def _readable(message: str) -> str:
    """``Expected `int`, got `str` - at `$.slots``` -> ``slots: expected int, got str``."""
    what, _, place = message.partition(" - at `$.")
    what = what.replace("`", "")
    return f"{place.rstrip('`')}: {what[0].lower()}{what[1:]}" if place else what
