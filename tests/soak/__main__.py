"""See the package."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from checkpoints import tiny_checkpoint
from engine.harness import TESTS, Server, server, store_folder
from soak.clients import Ledger, run_clients
from stagetap import open_dataset

MIB = 1024 * 1024
MAX_GROWTH = 0.02
WARM_UP_SHARE = 0.6
MIN_WARM_UP_SECONDS = 150.0
"""Before that a server on CPU still grows without StageTap too, and growth is only reported."""

ALLOCATOR = {
    # By default glibc gives every thread an arena; what those keep would drown a leak.
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}
OUTCOMES = ("committed", "failed", "aborted", "refused")
FAULTS = [
    {"on": "open", "do": "fail", "stage": 1, "every": 11},
    {"on": "write", "do": "raise", "stage": 0, "every": 17},
    {"on": "write", "do": "delay", "seconds": 0.2, "every": 5},
    {"on": "commit", "do": "fail", "every": 23},
]


def main() -> int:
    arguments = _parse()
    notes = Console(stderr=True)
    report = soak(arguments.minutes, arguments.clients, arguments.seed, notes)
    if arguments.json:
        print(json.dumps(report))
    else:
        _show(report)
    for wrong in report["wrong"]:
        notes.print(f"soak: {wrong}", style="red", soft_wrap=True, markup=False)
    return 1 if report["wrong"] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="how long clients send")
    parser.add_argument("--clients", type=int, default=12, help="that send at a time")
    parser.add_argument("--seed", type=int, default=0, help="of what they send")
    parser.add_argument("--json", action="store_true", help="one line of JSON on stdout")
    return parser.parse_args()


def soak(minutes: float, clients: int, seed: int, notes: Console) -> dict[str, Any]:
    """Run a server of two stages under load; what was sent, how it ended, what was left."""
    ledger = Ledger()
    with tempfile.TemporaryDirectory() as folder:
        store = store_folder("soak")
        faults = Path(folder, "faults.json")
        faults.write_text(json.dumps(FAULTS))
        notes.print("soak: starting a server of two stages")
        with server(
            [
                *(str(tiny_checkpoint("llama", Path(folder, "model"))), "--layers", "0,3,6"),
                *("--store", str(store), "--pp", "2", "--max-len", "256", "--"),
                *("--served-model-name", "soak", "--skip-tokenizer-init"),
                *("--block-size", "32", "--num-gpu-blocks-override", "40"),
                *("--max-num-batched-tokens", "128", "--max-num-seqs", "8"),
                *("--stagetap-options", '{"max_consecutive_failures": 8}'),
            ],
            {"PYTHONPATH": str(TESTS / "faults"), "STAGETAP_FAULTS": str(faults), **ALLOCATOR},
            Path(folder, "log"),
        ) as running:
            seconds = minutes * 60
            warm_up = seconds * WARM_UP_SHARE
            notes.print(f"soak: {clients} clients, {warm_up:.0f} s to warm up")
            run_clients(running.client, ledger, seed, clients, warm_up)
            before = _memory(running)
            notes.print(f"soak: {seconds - warm_up:.0f} s more")
            run_clients(running.client, ledger, seed + 1, clients, seconds - warm_up)
            left = _idle(running.client)
            after = _memory(running)
        readable = set()
        for sample in open_dataset(store, verify=True):
            readable.add(sample.sample_id)
    ledger.settle(readable)
    return _judge(ledger, before, after, left, warm_up >= MIN_WARM_UP_SECONDS)


def _memory(running: Server) -> dict[str, int]:
    """Resident bytes of every process of the server, by name and pid."""
    front_end = psutil.Process(running.process.pid)
    return {
        f"{_name(process)} {process.pid}": process.memory_info().rss
        for process in (front_end, *front_end.children(recursive=True))
    }


def _name(process: psutil.Process) -> str:
    title = " ".join(process.cmdline())
    return title.split()[0] if title.startswith("VLLM::") else process.name()


def _idle(client: httpx.Client, seconds: float = 60) -> dict[str, float]:
    """What the engine still holds once nobody asks it any more."""
    deadline = time.monotonic() + seconds
    while True:
        held = {
            sample.name + (f" stage {stage}" if (stage := sample.labels.get("stage")) else ""):
                sample.value
            for family in text_string_to_metric_families(client.get("/metrics").text)
            for sample in family.samples
            if sample.name in HELD
        }  # fmt: skip
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


HELD = (
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "stagetap_samples_under_way",
    "stagetap_slots_in_use",
    "stagetap_slot_waiters",
    "stagetap_hung_writes",
)


def _judge(
    ledger: Ledger,
    before: dict[str, int],
    after: dict[str, int],
    left: dict[str, float],
    warm: bool,
) -> dict[str, Any]:
    growth = {name: after.get(name, 0) / size - 1 for name, size in before.items()}
    ended = {outcome: ledger.ended[outcome] for outcome in OUTCOMES}
    wrong = list(ledger.surprises)
    wrong += [f"{name} ended" for name in before if name not in after]
    wrong += [
        f"{name} grew by {share:.1%}, more than {MAX_GROWTH:.0%}"
        for name, share in growth.items()
        if share > MAX_GROWTH and warm
    ]
    wrong += [f"{name} is {value:g} at the end" for name, value in left.items() if value]
    if sum(ended.values()) != ledger.sent:
        wrong.append(f"{ledger.sent} were sent and {sum(ended.values())} ended")
    wrong += [f"no sample {outcome}" for outcome, count in ended.items() if not count]
    return {
        "sent": ledger.sent,
        **ended,
        "suspended": ledger.suspended,
        "ordinary": ledger.ordinary,
        "rss_mib": {
            name: [round(size / MIB, 1), round(after.get(name, 0) / MIB, 1)]
            for name, size in before.items()
        },
        "growth_judged": warm,
        "growth": {name: round(share, 4) for name, share in growth.items()},
        "left": left,
        "wrong": wrong,
    }


def _show(report: dict[str, Any]) -> None:
    out = Console()
    table = Table("process", "MiB after warm-up", "MiB at the end", "growth")
    for name, (start, end) in report["rss_mib"].items():
        table.add_row(name, f"{start:.1f}", f"{end:.1f}", f"{report['growth'][name]:+.2%}")
    out.print(table)
    if not report["growth_judged"]:
        out.print("too short a run to judge memory by; --minutes 5 does")
    parts = " + ".join(f"{report[outcome]} {outcome}" for outcome in OUTCOMES)
    sign = "=" if sum(report[outcome] for outcome in OUTCOMES) == report["sent"] else "!="
    out.print(f"{parts} {sign} {report['sent']} sent; {report['ordinary']} ordinary beside them")
    out.print(f"used KV blocks at the end: {report['left'].get('vllm:kv_cache_usage_perc', 0):g}")


if __name__ == "__main__":
    sys.exit(main())
