"""The loss of a training run: in windows for a table, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from stagetap.errors import Refused


@dataclass(frozen=True)
class LossCurve:
    """Losses of a run.

    Attributes:
        steps: the loss of every step.
        epochs: steps done, and the loss on validation rows, behind every epoch.
    """

    steps: Sequence[float]
    epochs: Sequence[tuple[int, float]]

    @classmethod
    def of_reports(cls, reports: Sequence[dict[str, Any]]) -> LossCurve:
        """From the lines of a ``--stagetap-metrics`` file."""
        steps: list[float] = []
        epochs: list[tuple[int, float]] = []
        for report in reports:
            if "train" in report:
                steps.append(report["train"]["loss"])
            elif "loss_epoch" in report.get("val", {}):
                epochs.append((len(steps), report["val"]["loss_epoch"]))
        return cls(steps, epochs)

    def windows(self, count: int) -> list[tuple[int, int, float]]:
        """At most ``count`` stretches of the run: first step, step behind the last, mean loss."""
        total = len(self.steps)
        bounds = sorted({total * part // count for part in range(count + 1)})
        return [(start, end, fmean(self.steps[start:end])) for start, end in pairwise(bounds)]

    def draw(self, path: Path, title: str) -> None:
        """Draw it as a picture."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.add_subplot(
            # The first steps are far above all others.
            title=title,
            xlabel="step",
            ylabel="loss",
            yscale="log",
            xlim=(0, len(self.steps)),
        )
        axes.plot(self.steps, color="0.8", linewidth=0.8, label="step")
        windows = self.windows(_DRAWN_WINDOWS)
        middles = [(start + end) / 2 for start, end, _ in windows]
        axes.plot(middles, [mean for _, _, mean in windows], label="mean")
        if self.epochs:
            axes.plot(*zip(*self.epochs, strict=True), "o-", markersize=3, label="validation")
        axes.legend()
        figure.savefig(path, dpi=120)


_DRAWN_WINDOWS = 40


def require_matplotlib() -> None:
    """Raises Refused, naming the extra, when there is nothing to draw with."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise Refused('matplotlib is not installed: pip install "stagetap[train]"') from None
