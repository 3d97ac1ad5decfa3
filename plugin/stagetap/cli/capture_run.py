"""The loop of ``stagetap capture``: feed a session, count what comes back, know when to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stagetap.cli.disk import Room
from stagetap.engine.session import Captured, EngineStopped, Prompt
from stagetap.errors import StageTapError
from stagetap.prompts import TokenPrompt
from stagetap.wording import one_line

LISTED_FAILURES = 20


class Session(Protocol):
    """The part of :class:`stagetap.engine.session.CaptureSession` that is used here."""

    def capture(self, prompts: Iterable[Prompt], in_flight: int = 16) -> Iterator[Captured]: ...


@dataclass
class Tally:
    """What has happened so far.

    ``failures`` lists the first :data:`LISTED_FAILURES`; ``stopped`` says why prompts are left
    over: ``disk``, ``interrupt`` or ``failures``, too many of them in a row.
    """

    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    failed: int = 0
    failures: list[Captured] = field(default_factory=list)
    stopped: str | None = None

    def add(self, captured: Captured) -> None:
        """Count one sample that has ended."""
        if captured.error is None:
            self.samples += 1
            self.tokens += captured.tokens
            self.bytes += captured.bytes
            return
        self.failed += 1
        if len(self.failures) < LISTED_FAILURES:
            self.failures.append(captured)


class CaptureRun:
    """One pass over prompts. ``tally`` is right at every moment.

    Args:
        session: captures.
        prompts: those that are to be captured.
        guard: asked before every prompt whether there is room for it.
        output_rows: rows that a sample has beyond its prompt, at most.
        wants_stop: asked before every prompt whether to take no more.
        on_sample: told of every sample that has ended.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[TokenPrompt],
        guard: Room,
        *,
        output_rows: int = 0,
        wants_stop: Callable[[], bool] = lambda: False,
        on_sample: Callable[[Captured], None] = lambda captured: None,
    ) -> None:
        self.tally = Tally()
        self._session = session
        self._prompts = prompts
        self._guard = guard
        self._output_rows = output_rows
        self._wants_stop = wants_stop
        self._on_sample = on_sample
        self._rows_in_flight: dict[str, int] = {}  # by sample id
        self._last_line: int | None = None

    def run(self, in_flight: int) -> Tally:
        """Capture until the prompts are done or there is a reason to stop.

        Raises:
            StageTapError: the engine refused a prompt (named by line) or stopped.
        """
        try:
            for captured in self._session.capture(self._feed(), in_flight):
                self._rows_in_flight.pop(captured.sample_id, None)
                if captured.suspended:
                    self.tally.stopped = "failures"  # and this prompt is one of those left over
                    continue
                self.tally.add(captured)
                if captured.error is None:
                    self._guard.observe(captured.tokens, captured.bytes)
                self._on_sample(captured)
        except EngineStopped as error:
            raise self._stopped(error) from error
        except StageTapError as error:
            raise StageTapError(
                f"line {self._last_line}: {error}; {self._kept()}, mend the line and run the same "
                "command with --resume"
            ) from error
        except Exception as error:
            # An engine dies with exceptions of many libraries.
            raise self._stopped(error) from error
        return self.tally

    def _feed(self) -> Iterator[Prompt]:
        for prompt in self._prompts:
            if self.tally.stopped is not None:
                return
            if self._wants_stop():
                self.tally.stopped = "interrupt"
                return
            rows = len(prompt.token_ids) + self._output_rows
            if not self._guard.admits([*self._rows_in_flight.values(), rows]):
                self.tally.stopped = "disk"
                return
            self._rows_in_flight[prompt.sample_id] = rows
            self._last_line = prompt.number
            yield Prompt(
                token_ids=prompt.token_ids.tolist(),
                sample_id=prompt.sample_id,
                metadata=prompt.metadata,
            )

    def _stopped(self, error: Exception) -> StageTapError:
        return StageTapError(
            f"the engine stopped: {one_line(error)}; {self._kept()}, run the same command with "
            "--resume when the cause is mended"
        )

    def _kept(self) -> str:
        return f"what is committed stays, {self.tally.samples} samples at least"
