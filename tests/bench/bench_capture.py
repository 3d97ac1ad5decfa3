"""Capture to file against no capture, and the cache that taps take on the heaviest stage.

Engines run one after the other, each in a process of its own, in the order A B B A, so that a
machine that gets slower or faster meanwhile favours neither.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.disk_probe import DiskFigures, DiskProbe
from bench.engine_child import CROWDS, MODES
from stagetap.models import resolve_model

TESTS = Path(__file__).resolve().parents[1]
LAYERS = (2, 15, 27, 30)
STAGES = 2


@dataclass(frozen=True)
class EngineSpec:
    """One engine start.

    ``store`` is empty for an engine without StageTap, ``modes`` says which of MODES and CROWDS an
    engine with it is measured in. With ``clients`` samples are timed on their
    way to a trainer, for each of these numbers of clients.
    """

    model: str
    pp: int
    store: str
    rounds: int
    prompts: int
    tokens: int
    seed: int
    layers: list[int] = field(default_factory=lambda: list(LAYERS))
    modes: list[str] = field(default_factory=lambda: [*MODES, *CROWDS])
    clients: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class CaptureFigures:
    """Tokens/s are medians. ``over_plain`` is the ratio that counts.

    ``over_not_exporting`` compares turns of one engine: it tells what a request's own export costs,
    and is less disturbed by other users of the machine, as are the next two.
    ``prefill_only_over_one_token``: exporting requests that sample nothing over those with
    ``max_tokens`` 1. ``committed_over_accepted``: 32 clients that wait for each commit over 32 that
    do not. ``spread`` is (max - min) / median of the plain rounds: how far to trust the ratios.
    """

    over_plain: float
    over_not_exporting: float
    prefill_only_over_one_token: float
    committed_over_accepted: float
    plain_tokens_per_s: float
    not_exporting_tokens_per_s: float
    exporting_tokens_per_s: float
    spread: float
    rounds: int


@dataclass(frozen=True)
class CacheFigures:
    """``ratio``: bytes a token on the heaviest stage over the single-stage figure.

    ``share`` is that stage's share of the taps, which ``ratio`` should equal.
    """

    ratio: float
    share: float
    heaviest_bytes_per_token: float
    single_bytes_per_token: float


def measure(
    rounds: int, prompts: int, tokens: int, notify: Callable[[str], None], stores: Path | None
) -> tuple[CaptureFigures, CacheFigures, DiskFigures]:
    """Start five engines: two without StageTap, two with it, and a single-stage one.

    ``stores`` is a folder on the disk to capture to; default: the one of temporary files.
    """
    model = resolve_model("smollm2")
    plain: list[float] = []
    rates: dict[str, list[float]] = defaultdict(list)
    caches: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="stagetap-bench-", dir=stores) as folder,
        DiskProbe(Path(folder)) as probe,
    ):
        for seed, captures in enumerate((False, True, True, False)):
            notify(f"engine {seed + 1} of 5: {'with' if captures else 'without'} StageTap")
            store = str(Path(folder, f"store-{seed}")) if captures else ""
            found = run_engine(
                EngineSpec(model, STAGES, store, rounds, prompts, tokens, seed), folder
            )
            plain += found.get("plain", [])
            for name in (*MODES, *CROWDS):
                rates[name] += found.get(name, [])
            caches = found.get("tap_caches", caches)
        notify("engine 5 of 5: one stage, for its cache")
        store = str(Path(folder, "store-single"))
        (single,) = run_engine(EngineSpec(model, 1, store, 0, 1, 16, 9), folder)["tap_caches"]

    def ratio(ours: str, theirs: str) -> float:
        """Median over the turns of one engine."""
        turns = zip(rates[ours], rates[theirs], strict=True)
        return statistics.median(one / other for one, other in turns)

    exporting = statistics.median(rates["exporting"])
    capture = CaptureFigures(
        over_plain=exporting / statistics.median(plain),
        over_not_exporting=ratio("exporting", "not_exporting"),
        prefill_only_over_one_token=ratio("prefill_only", "exporting"),
        committed_over_accepted=ratio("committed", "accepted"),
        plain_tokens_per_s=statistics.median(plain),
        not_exporting_tokens_per_s=statistics.median(rates["not_exporting"]),
        exporting_tokens_per_s=exporting,
        spread=(max(plain) - min(plain)) / statistics.median(plain),
        rounds=len(plain),
    )
    heaviest = max(caches, key=lambda cache: cache["bytes_per_token"])
    cache = CacheFigures(
        ratio=heaviest["bytes_per_token"] / single["bytes_per_token"],
        share=len(heaviest["taps"]) / len(single["taps"]),
        heaviest_bytes_per_token=heaviest["bytes_per_token"],
        single_bytes_per_token=single["bytes_per_token"],
    )
    return capture, cache, probe.figures()


def run_engine(spec: EngineSpec, folder: str) -> dict[str, Any]:
    """Run one engine to its end. Raises RuntimeError with the end of its output when it fails."""
    result = Path(folder, "result.json")
    argument = json.dumps({**asdict(spec), "result": str(result)})
    child = subprocess.run(
        [sys.executable, "-m", "bench.engine_child", argument],
        cwd=TESTS,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if child.returncode != 0:
        raise RuntimeError(f"an engine ended with {child.returncode}:\n{child.stdout[-4000:]}")
    return dict(json.loads(result.read_text()))
