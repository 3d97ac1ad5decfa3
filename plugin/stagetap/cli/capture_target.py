"""Where ``stagetap capture`` stores: a directory, or a run in Mooncake. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from stagetap.errors import Refused
from stagetap.stores.mooncake_uri import format_uri, is_mooncake, parse_uri, with_run

DEFAULT_RUN = "capture"
_KEEP_FREE_MIB = 512
_MIB = 1024 * 1024


@dataclass(frozen=True)
class CaptureTarget:
    """A store's address and a run in it; ``keep_free_bytes`` of its disk, None if it has none."""

    out: str
    run_id: str
    keep_free_bytes: int | None


def capture_target(
    out: str, run: str | None, *, resume: bool, keep_free_mib: int | None
) -> CaptureTarget:
    """What the options of the command say together.

    Raises:
        Refused: they contradict each other, or would store samples that nobody could ever read.
    """
    if run == "":
        raise Refused("--run is empty: name the run, or leave the option out")
    if not is_mooncake(out):
        kept = _KEEP_FREE_MIB if keep_free_mib is None else keep_free_mib
        return CaptureTarget(out, run or DEFAULT_RUN, kept * _MIB)
    options = parse_uri(out)
    run_id = run or options.run or DEFAULT_RUN
    options = with_run(options, run_id)
    if resume:
        raise Refused(
            f"{out}: --resume cannot tell what was consumed from what is missing: leave it out, "
            "or give another run"
        )
    if keep_free_mib is not None:
        raise Refused(f"{out} is on no disk: leave --keep-free-mib out")
    if options.global_segment_size:
        cure = format_uri(msgspec.structs.replace(options, global_segment_size=0))
        raise Refused(
            f"{out}: what the engine's workers lend goes with the engine when the capture ends: "
            f"let `stagetap store up --lend` or a mooncake_client hold the samples, and say {cure}"
        )
    return CaptureTarget(format_uri(options), run_id, None)
