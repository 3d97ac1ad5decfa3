"""``./justw bench``: tables of ratios with their goals; one line of JSON with ``--json``."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import bench_capture, bench_mooncake, bench_online, bench_reader
from stagetap.cli.output import activity
from stagetap.wording import counted

PARTS = ("reader", "capture", "mooncake")

Notify = Callable[[str], None]


def main() -> None:
    """Measure and show. The exit code says that it worked, not that a goal was met."""
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="timed batches an engine and mode")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a batch")
    parser.add_argument("--tokens", type=int, default=500, help="tokens in a prompt")
    parser.add_argument("--turns", type=int, default=15, help="turns of each size in Mooncake")
    parser.add_argument(
        "--stores", type=Path, help="folder on the disk to capture to; default: temporary files"
    )
    arguments = parser.parse_args()
    document: dict[str, object] = {}
    tables: list[Table] = []
    measures = {"reader": _reader, "capture": _capture, "mooncake": _mooncake}
    with activity() as notify:
        for part in arguments.only or PARTS:
            measured, shown = measures[part](arguments, notify)
            document |= measured
            tables += shown
    if arguments.json:
        print(json.dumps(document))
    else:
        for table in tables:
            Console().print(table)


def _reader(_: argparse.Namespace, notify: Notify) -> tuple[dict[str, object], list[Table]]:
    notify("reading")
    with tempfile.TemporaryDirectory(prefix="stagetap-bench-") as folder:
        bench_reader.write_store(Path(folder, "store"))
        reader = bench_reader.measure(Path(folder, "store"))
    table = _ratios()
    table.add_row(
        "reader bytes/s over safe_open + torch.cat",
        f"{reader.ratio:.2f}",
        ">= 0.90",
        f"{reader.reader_bytes_per_s / 1e9:.2f} over {reader.baseline_bytes_per_s / 1e9:.2f} GB/s",
    )
    return {"reader": asdict(reader)}, [table]


def _capture(
    arguments: argparse.Namespace, notify: Notify
) -> tuple[dict[str, object], list[Table]]:
    capture, cache, disk = bench_capture.measure(
        arguments.rounds, arguments.prompts, arguments.tokens, notify, arguments.stores
    )
    table = _ratios()
    table.add_row(
        "tokens/s, capture to file over vLLM without StageTap",
        f"{capture.over_plain:.3f}",
        ">= 0.95",
        f"{capture.exporting_tokens_per_s:.0f} over {capture.plain_tokens_per_s:.0f} "
        f"tokens/s, spread {capture.spread:.0%}",
    )
    table.add_row(
        "tokens/s, exporting over not exporting, one engine",
        f"{capture.over_not_exporting:.3f}",
        "",
        f"{capture.exporting_tokens_per_s:.0f} over "
        f"{capture.not_exporting_tokens_per_s:.0f} tokens/s",
    )
    table.add_row(
        "tokens/s, prefill-only over max_tokens=1, both exporting",
        f"{capture.prefill_only_over_one_token:.3f}",
        "",
        "",
    )
    table.add_row(
        "tokens/s of 32 clients, committed over accepted",
        f"{capture.committed_over_accepted:.3f}",
        ">= 0.98",
        "",
    )
    table.add_row(
        "tap cache a token, heaviest stage over one stage",
        f"{cache.ratio:.3f}",
        f"{cache.share:.3f}",
        f"{cache.heaviest_bytes_per_token:.0f} over {cache.single_bytes_per_token:.0f} bytes",
    )
    table.add_row(
        "meanwhile, an fsync of 1 MiB on that disk",
        "",
        "",
        f"median {1000 * disk.median_s:.0f} ms, at most {1000 * disk.max_s:.0f} ms",
    )
    found = {"capture": asdict(capture), "tap_cache": asdict(cache), "disk": asdict(disk)}
    return found, [table]


def _mooncake(
    arguments: argparse.Namespace, notify: Notify
) -> tuple[dict[str, object], list[Table]]:
    document, tables = [], []
    for lender in bench_mooncake.LENDERS:
        notify(f"Mooncake, memory of {lender}")
        sizes = bench_mooncake.measure(lender, arguments.turns)
        document += [asdict(figures) for figures in sizes]
        columns = [f"{figures.mib} MiB" for figures in sizes]
        table = Table(f"bytes/s, memory of {lender}", "goal", *columns)
        for name, baseline in bench_mooncake.OVER_PLAIN.items():
            ratios = [f"{figures.over_plain[name]:.2f}" for figures in sizes]
            table.add_row(f"{name}, over {baseline}", ">= 0.90", *ratios)
        for name, staged in bench_mooncake.OVER_STAGED.items():
            ratios = [f"{figures.over_staged[name]:.2f}" for figures in sizes]
            table.add_row(f"{name}, over {staged}", "", *ratios)
        for name in sizes[0].over_hs:  # none unless hs-connectors is installed
            ratios = [f"{figures.over_hs[name]:.2f}" for figures in sizes]
            table.add_row(f"{name}, over {bench_mooncake.OVER_HS[name]}", "> 1.00", *ratios)
        for name in sizes[0].seconds:
            table.add_row(name, "", *[f"{1000 * each.seconds[name]:.2f} ms" for each in sizes])
        tables.append(table)
    online = bench_online.measure(arguments.rounds, arguments.prompts, arguments.tokens, notify)
    table = _ratios()
    table.add_row(
        "tokens/s, export to Mooncake over vLLM without StageTap",
        f"{online.over_plain:.3f}",
        ">= 0.95",
        f"{online.exporting_tokens_per_s:.0f} over {online.plain_tokens_per_s:.0f} tokens/s, "
        f"spread {online.spread:.0%}",
    )
    table.add_row(
        "tokens/s, exporting over not exporting, one engine",
        f"{online.over_not_exporting:.3f}",
        "",
        "",
    )
    for each in online.latency:
        table.add_row(
            f"last prefill chunk to trainer, {counted(each.clients, 'client')}",
            "",
            "",
            f"p50 {each.p50_ms:.1f} ms, p99 {each.p99_ms:.1f} ms of {each.samples} samples",
        )
    return {"mooncake": document, "online": asdict(online)}, [*tables, table]


def _ratios() -> Table:
    return Table("what", "ratio", "goal", "figures")


if __name__ == "__main__":
    main()
