"""The progress line of ``stagetap capture``: samples, tokens/s, bytes, room left on the disk."""

from __future__ import annotations

import time
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stagetap.cli.capture_run import Tally
from stagetap.cli.disk import Room
from stagetap.cli.output import human_bytes, notes


class CaptureProgress:
    """A context that draws a :class:`Tally` on stderr; ``seconds`` is the time since it began."""

    def __init__(self, total: int, guard: Room) -> None:
        self._guard = guard
        self._total = total
        self._progress = Progress(
            TextColumn("capturing"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
            console=notes(),
        )
        self._task = self._progress.add_task("capture", total=total, state="")
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the context was entered."""
        return time.monotonic() - self._began

    def show(self, tally: Tally) -> None:
        """Draw the numbers of now."""
        rate = tally.tokens / max(self.seconds, 1e-9)
        failed = f"  {tally.failed} failed" if tally.failed else ""
        free = self._guard.free_bytes()
        self._progress.update(
            self._task,
            completed=tally.samples + tally.failed,
            state=f"{rate:.0f} tokens/s  {human_bytes(tally.bytes)}"
            + ("" if free is None else f"  {human_bytes(free)} free")
            + failed,
        )

    def __enter__(self) -> CaptureProgress:
        self._progress.start()
        self._began = time.monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
