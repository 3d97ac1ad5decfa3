"""``stagetap demo-train``: from prompts to a draft that speeds its target up, on a real model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagetap.cli.interrupt import termination_interrupts
from stagetap.cli.output import activity, results, table
from stagetap.models import resolve_model

if TYPE_CHECKING:
    from stagetap.cli.demo_train_job import Report

SHOWN_WINDOWS = 10


def demo_train_command(
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Where dataset, draft and picture stay. An earlier dataset is used again."
        ),
    ] = Path("demo-draft"),
    eagle3: Annotated[bool, typer.Option("--eagle3", help="EAGLE-3 in place of DSpark.")] = False,
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Passes over the rows; default: enough.")
    ] = None,
) -> None:
    """Capture SmolLM2 on two stages, train a draft on that, and serve it on held-out prompts.

    Ends with exit code 1 unless the trained draft has more of its tokens accepted than the
    untrained one, and greedy decoding gives the same tokens with either as without.
    """
    from stagetap.cli.demo_train_job import DSPARK, EAGLE3, Demo, check_folder
    from stagetap.training.loss_curve import require_matplotlib
    from stagetap.training.register import require_speculators

    check_folder(out)
    require_speculators()
    require_matplotlib()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    method = EAGLE3 if eagle3 else DSPARK
    demo = Demo(resolve_model("smollm2"), out, method, epochs or method.epochs)
    with termination_interrupts(), activity() as notify:
        report = demo.run(notify)
    _show(report)
    if not report.passed:
        raise typer.Exit(1)


def _show(report: Report) -> None:
    console, method = results(), report.method
    losses = table("steps", "loss", title=f"{method.name}, trained on {report.captured}")
    for start, end, mean in report.curve.windows(SHOWN_WINDOWS):
        losses.add_row(f"{start} to {end - 1}", f"{mean:.4f}")
    console.print(losses)
    console.print(f"loss curve: {report.picture}", soft_wrap=True)
    served = table(
        *("draft", "accepted", "mean length"),
        *(f"position {position + 1}" for position in range(method.speculative_tokens)),
        title=f"{method.held_out} held-out prompts, up to {method.tokens} tokens each, greedy",
    )
    for name, each in (("untrained", report.untrained), ("trained", report.trained)):
        served.add_row(
            name,
            f"{each.accepted_share:.2%}",
            f"{each.mean_length:.3f}",
            *(f"{count / max(each.drafts, 1):.2%}" for count in each.accepted_at),
        )
    console.print(served)
    took = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in report.seconds.items())
    console.print(took)
    console.print(f"same tokens as without a draft: {'yes' if report.same_tokens else 'no'}")
    better = report.trained.accepted_share > report.untrained.accepted_share
    console.print(f"better than untrained: {'yes' if better else 'no'}")
