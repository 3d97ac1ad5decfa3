"""``stagetap inspect``: what a dataset holds, or one of its samples."""

from __future__ import annotations

from collections import Counter, deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column, Table

from stagetap.cli.arguments import JsonOption
from stagetap.cli.output import human_bytes, print_json, results, table
from stagetap.errors import AmbiguousSample, Refused, SampleNotFound

if TYPE_CHECKING:
    from stagetap.stores.base import CommitEntry

RECENT = 5
"""How many of the last commits are named."""


def inspect_command(
    uri: Annotated[
        str, typer.Argument(help="A directory, file:///directory or mooncake://MASTER:PORT/RUN.")
    ],
    sample: Annotated[str | None, typer.Argument(help="One sample, by its id.")] = None,
    run: Annotated[str | None, typer.Option("--run", help="This run alone.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show model, taps, runs, stages, samples and sizes; or the fragments of one sample.

    Reads manifests only, also while a run is written or consumed. `verify` looks at the data.
    """
    if sample is None:
        document = _dataset(uri, run)
        show = _show_dataset
    else:
        document = _sample(uri, sample, run)
        show = _show_sample
    if as_json:
        print_json(document)
    else:
        show(document)


def _dataset(uri: str, run: str | None) -> dict[str, Any]:
    from msgspec.structs import asdict

    from stagetap.cli.committed import live_commits
    from stagetap.stores.base import open_store_reader

    reader = open_store_reader(uri)
    runs: dict[str, dict[str, Any]] = {}
    stages: dict[tuple[str, int, tuple[int, ...]], Counter[str]] = {}
    known: set[str] = set()
    recent: deque[CommitEntry] = deque(maxlen=RECENT)
    for entry in live_commits(reader):
        known.add(entry.run_id)
        if run not in (None, entry.run_id):
            continue
        try:
            manifest = reader.manifest(entry)
        except SampleNotFound:
            continue  # consumed since
        recent.append(entry)
        tapped = manifest.tapped
        found = runs.setdefault(
            manifest.run_id,
            {
                "run_id": manifest.run_id,
                "model": tapped.model,
                "vllm_version": tapped.vllm_version,
                "series_digest": tapped.series_digest,
                "layouts": [],
                "samples": 0,
                "tokens": 0,
                "bytes": 0,
                "first": manifest.created_at,
                "last": manifest.created_at,
            },
        )
        layout = f"PP={tapped.pp_size} TP={tapped.tp_size}"
        if layout not in found["layouts"]:
            found["layouts"].append(layout)
        found["samples"] += 1
        found["tokens"] += manifest.token_count
        found["bytes"] += sum(fragment.byte_size for fragment in manifest.fragments)
        found["last"] = manifest.created_at
        for fragment in manifest.fragments:
            ids = tuple(layer.id for layer in fragment.layers)
            counted = stages.setdefault((manifest.run_id, fragment.stage, ids), Counter())
            counted.update(fragments=1, bytes=fragment.byte_size)
    if run is not None and run not in known:
        raise Refused(f"{uri} has no run {run!r}; it has {', '.join(sorted(known)) or 'none'}")
    return {
        "uri": uri,
        **asdict(reader.invariant),
        **{key: sum(each[key] for each in runs.values()) for key in ("samples", "tokens", "bytes")},
        "recent": [
            {
                "run_id": entry.run_id,
                "sample_id": entry.sample_id,
                "committed_at": _moment(entry.committed_at_ns),
            }
            for entry in reversed(recent)
        ],
        "runs": list(runs.values()),
        "stages": [
            {"run_id": run_id, "stage": stage, "layers": list(ids), **counted}
            for (run_id, stage, ids), counted in sorted(stages.items())
        ],
    }


def _sample(uri: str, sample_id: str, run: str | None) -> dict[str, Any]:
    import msgspec

    from stagetap.cli.committed import live_commits
    from stagetap.stores.base import open_store_reader

    reader = open_store_reader(uri)
    entries = [
        entry
        for entry in live_commits(reader)
        if entry.sample_id == sample_id and run in (None, entry.run_id)
    ]
    if not entries:
        raise SampleNotFound(
            f"{uri} holds no sample {sample_id!r}{f' of run {run!r}' if run else ''}; look at what "
            f"it holds with `stagetap inspect {uri}`",
            sample_id=sample_id,
        )
    if len(entries) > 1:
        runs = ", ".join(entry.run_id for entry in entries)
        raise AmbiguousSample(
            f"sample {sample_id!r} is in several runs ({runs}); name one with --run",
            sample_id=sample_id,
        )
    return dict(msgspec.to_builtins(reader.manifest(entries[0])))


def _show_dataset(document: dict[str, Any]) -> None:
    console = results()
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for label, value in (
        ("dataset", document["uri"]),
        ("model", ", ".join(dict.fromkeys(run["model"] for run in document["runs"])) or "-"),
        ("weights", document["weights_fingerprint"]),
        ("taps", _ids(document["layer_ids"])),
        ("decoder layers", document["num_hidden_layers"]),
        ("stream", f"{document['stream']}, {document['dtype']} [{document['hidden_size']}]"),
        ("samples", document["samples"]),
        ("tokens", document["tokens"]),
        ("hidden states", human_bytes(document["bytes"])),
    ):
        facts.add_row(label, str(value))
    console.print(facts)
    if not document["runs"]:
        console.print("no samples: none has been committed yet, or all were consumed or removed")
        return
    runs = table("run", "layout", "samples", "tokens", "size", "vLLM", "last commit")
    for run in document["runs"]:
        runs.add_row(
            run["run_id"],
            ", ".join(run["layouts"]),
            str(run["samples"]),
            str(run["tokens"]),
            human_bytes(run["bytes"]),
            run["vllm_version"],
            run["last"][:19],
        )
    console.print(runs)
    stages = table("run", "stage", "layers", "fragments", "size")
    for stage in document["stages"]:
        stages.add_row(
            stage["run_id"],
            str(stage["stage"]),
            _ids(stage["layers"]),
            str(stage["fragments"]),
            human_bytes(stage["bytes"]),
        )
    console.print(stages)
    recent = table("last commits", "run", "at")
    for entry in document["recent"]:
        recent.add_row(entry["sample_id"], entry["run_id"], entry["committed_at"][:19])
    console.print(recent)


def _moment(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def _show_sample(document: dict[str, Any]) -> None:
    console = results()
    tapped = document["tapped"]
    facts = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for label, value in (
        ("sample", document["sample_id"]),
        ("run", document["run_id"]),
        ("attempt", document["attempt"]),
        ("tokens", f"{document['token_count']}, prompt {document['prompt_token_count']}"),
        ("token digest", document["token_digest"]),
        ("model", tapped["model"]),
        ("layout", f"PP={tapped['pp_size']} TP={tapped['tp_size']}"),
        ("taps", _ids(tapped["layer_ids"])),
        ("created", document["created_at"]),
        ("metadata", document["metadata"] or "-"),
    ):
        facts.add_row(label, str(value))
    console.print(facts)
    fragments = table("stage", "layers", "dtype", "shape", "bytes", "checksum", "path")
    for fragment in document["fragments"]:
        fragments.add_row(
            str(fragment["stage"]),
            ", ".join(f"{layer['id']} {layer['role']}" for layer in fragment["layers"]),
            fragment["dtype"],
            "×".join(map(str, fragment["shape"])),
            str(fragment["byte_size"]),
            fragment["checksum"],
            fragment["path"],
        )
    console.print(fragments)


def _ids(layer_ids: list[int]) -> str:
    return ", ".join(map(str, layer_ids))
