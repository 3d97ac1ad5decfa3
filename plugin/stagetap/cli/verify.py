"""``stagetap verify``: look at every byte of a dataset, and sweep what no commit names."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress

from stagetap.cli.arguments import JsonOption
from stagetap.cli.output import human_bytes, notes, print_json, results, table

if TYPE_CHECKING:
    from stagetap.stores.verify_report import VerifyReport


def verify_command(
    uri: Annotated[
        str, typer.Argument(help="A directory, file:///directory or mooncake://MASTER:PORT/RUN.")
    ],
    gc: Annotated[
        bool, typer.Option("--gc", help="Remove what no commit names. No capture may be running.")
    ] = False,
    checksums: Annotated[
        bool, typer.Option("--checksums/--no-checksums", help="Read all data, or sizes only.")
    ] = True,
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            help="HOST:PORT of a Mooncake master's HTTP server, to learn what is left over there.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check that every committed sample is whole. Exit code 1 when one is not."""
    from stagetap.stores.mooncake_uri import is_mooncake
    from stagetap.stores.mooncake_verify import SETTLE_SECONDS
    from stagetap.stores.verify import verify

    if gc and metrics is not None and is_mooncake(uri):  # without it is refused
        notes().print(f"what is left over is looked at again after {SETTLE_SECONDS:.0f} s")
    with Progress(console=notes(), transient=True) as progress:
        task = progress.add_task("verifying", total=None)
        report = verify(
            uri,
            checksums=checksums,
            gc=gc,
            metrics=metrics,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if as_json:
        print_json(_document(uri, checksums, report))
    else:
        _show(uri, checksums, report)
    if not report.ok:
        raise typer.Exit(1)


def _document(uri: str, checksums: bool, report: VerifyReport) -> dict[str, Any]:
    return {
        "uri": uri,
        "ok": report.ok,
        "checksums": checksums,
        "samples": report.samples,
        "bytes": report.bytes,
        "problems": [asdict(problem) for problem in report.problems],
        "duplicates": [
            {"run_id": entry.run_id, "sample_id": entry.sample_id, "attempt": entry.attempt}
            for entry in report.duplicates
        ],
        "orphans": [asdict(orphan) for orphan in report.orphans],
        "live_writers": report.live_writers,
        "swept_bytes": report.swept_bytes,
    }


def _show(uri: str, checksums: bool, report: VerifyReport) -> None:
    console = results()
    if report.problems:
        rows = table("sample", "run", "stage", "problem", "what is wrong")
        for problem in report.problems:
            rows.add_row(
                problem.sample_id or "-",
                problem.run_id or "-",
                "-" if problem.stage is None else str(problem.stage),
                problem.kind,
                problem.message,
            )
        console.print(rows)
    how = "every byte compared" if checksums else "sizes compared, checksums not"
    console.print(
        f"{uri}: {report.samples} samples whole, {human_bytes(report.bytes)} ({how}), "
        f"{len(report.problems)} not",
        soft_wrap=True,
    )
    if not report.samples and not report.problems:
        console.print("no samples: none has been committed yet, or all were consumed or removed")
    for entry in report.duplicates:
        console.print(
            f"committed twice: sample {entry.sample_id!r} of run {entry.run_id!r}; attempt "
            f"{entry.attempt} came later and does not count",
            soft_wrap=True,
        )
    if report.orphans:
        size = human_bytes(sum(orphan.size_bytes for orphan in report.orphans))
        if report.swept_bytes is not None:
            console.print(f"swept {len(report.orphans)} leftovers, {size}")
        elif report.live_writers:
            console.print(
                f"{len(report.orphans)} attempts without a commit, {size}; a writer is at work, "
                "they may be its own"
            )
        else:
            console.print(
                f"{len(report.orphans)} leftovers that no commit names, {size}; remove them with "
                "--gc"
            )
