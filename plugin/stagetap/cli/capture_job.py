"""What ``stagetap capture`` does: every check that needs no engine, then the engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagetap.cli.capture_progress import CaptureProgress
from stagetap.cli.capture_run import CaptureRun, Tally
from stagetap.cli.capture_target import CaptureTarget
from stagetap.cli.committed import CommittedSamples
from stagetap.cli.disk import DiskGuard, NoDisk, Room
from stagetap.cli.interrupt import Interruption
from stagetap.cli.model_facts import model_facts
from stagetap.cli.output import activity, human_bytes, notes
from stagetap.cli.tokenized import load_prompts
from stagetap.config_values import asked_dtype
from stagetap.engine.checkpoint import fingerprint_ahead
from stagetap.errors import Refused
from stagetap.partition import engine_stages
from stagetap.prompts import TokenPrompt, check_lengths, check_token_ids
from stagetap.stores.base import (
    KnownKind,
    check_store,
    check_store_writable,
    check_stored,
    file_root,
)
from stagetap.stores.file_jobs import CaptureNote
from stagetap.taps import validate_layer_ids

DECIDING_ARGS = ("dtype", "kv_cache_dtype", "quantization", "hf_overrides", "model_impl")
"""Arguments of vLLM that change what a model computes."""

UNSAID = (None, "auto")


@dataclass(frozen=True)
class CaptureJob:
    """One call of ``stagetap capture``; ``engine_args`` are those of vLLM's ``EngineArgs``."""

    model: str
    layers: tuple[int, ...]
    target: CaptureTarget
    pp: int
    tp: int
    max_len: int | None
    include_output: int
    in_flight: int
    engine_args: dict[str, Any]

    def run(self, prompt_file: Path, resume: bool) -> dict[str, Any]:
        """Capture what is missing and report, in terms that JSON can hold.

        Raises:
            Refused: before an engine starts, or by the engine at its start.
            StageTapError: the engine did not start or stopped.
        """
        facts = model_facts(self.model)
        fingerprint = fingerprint_ahead(
            self.model, str(self.engine_args.get("load_format", "auto"))
        )
        validate_layer_ids(self.layers, facts.num_hidden_layers)
        if facts.num_hidden_layers is not None:
            engine_stages(facts.num_hidden_layers, self.pp)
        known = KnownKind(
            layer_ids=self.layers,
            weights_fingerprint=fingerprint,
            dtype=asked_dtype(self.engine_args.get("dtype")),
        )
        check_store(self.target.out, known)
        committed = self._committed(resume)
        prompts = load_prompts(prompt_file, self.model)
        if facts.vocab_size is not None:
            check_token_ids(prompt_file, prompts, facts.vocab_size)
        if (max_len := self.max_len or facts.max_len) is not None:
            check_lengths(prompt_file, prompts, max_len, self.include_output)
        missing = prompts if committed is None else committed.missing(prompts)
        guard = self._guard(facts.row_bytes(len(self.layers), self.engine_args.get("dtype")))
        if isinstance(guard, DiskGuard):
            self._check_room(guard, missing)
        tally, seconds = Tally(), 0.0
        if missing:
            check_store_writable(self.target.out)
            check_stored(self.target.out, known)
            tally, seconds = self._run_engine(missing, guard, committed)
        return {
            "out": self.target.out,
            "run": self.target.run_id,
            "model": self.model,
            "layer_ids": list(self.layers),
            "pp": self.pp,
            "tp": self.tp,
            "prompts": len(prompts),
            "skipped": len(prompts) - len(missing),
            "samples": tally.samples,
            "failed": tally.failed,
            "left": len(missing) - tally.samples - tally.failed,
            "tokens": tally.tokens,
            "bytes": tally.bytes,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tally.tokens / seconds, 1) if seconds else 0.0,
            "stopped": tally.stopped,
            "free_bytes": guard.free_bytes(),
            "failures": [
                {"sample_id": failure.sample_id, "error": failure.error}
                for failure in tally.failures
            ],
        }

    @property
    def _output_rows(self) -> int:
        """Rows of a sample beyond its prompt: the last output token has no state."""
        return max(0, self.include_output - 1)

    @property
    def _asked(self) -> CaptureNote:
        """What must be the same when the run is gone on with. PP and TP change nothing."""
        deciding = {name: self.engine_args.get(name) for name in DECIDING_ARGS}
        deciding["dtype"] = asked_dtype(deciding["dtype"])
        return CaptureNote(
            include_output=self.include_output,
            engine_args={name: said for name, said in deciding.items() if said not in UNSAID},
        )

    def _committed(self, resume: bool) -> CommittedSamples | None:
        """None in Mooncake: what is gone from there was consumed, and the engine knows the rest."""
        out, run_id = self.target.out, self.target.run_id
        if self.target.keep_free_bytes is None:
            return None
        committed = CommittedSamples(out, run_id)
        if len(committed) and not resume:
            raise Refused(
                f"{out} holds {len(committed)} samples of run {run_id!r} already; add "
                "--resume to capture what is missing, or choose another --out or --run"
            )
        committed.check(self._asked)
        return committed

    def _guard(self, row_bytes: int | None) -> Room:
        if self.target.keep_free_bytes is None:
            return NoDisk()
        return DiskGuard(Path(file_root(self.target.out)), self.target.keep_free_bytes, row_bytes)

    def _check_room(self, guard: DiskGuard, prompts: Sequence[TokenPrompt]) -> None:
        """Refuse to start an engine for nothing; remark when the room will not do for all."""
        rows = [len(prompt.token_ids) + self._output_rows for prompt in prompts]
        if rows and not guard.admits(rows[:1]):
            raise Refused(
                f"the disk of {self.target.out} has {human_bytes(guard.free_bytes())} free and "
                f"{human_bytes(guard.keep_free_bytes)} are to stay free; make room, or lower "
                "--keep-free-mib"
            )
        if not guard.admits(rows):
            needed = sum(guard.sample_bytes(count) for count in rows)
            notes().print(
                f"note: the samples need up to {human_bytes(needed)}, "
                f"{human_bytes(guard.free_bytes())} are free: the capture will stop before the "
                "disk is full",
                soft_wrap=True,
            )

    def _run_engine(
        self, prompts: Sequence[TokenPrompt], guard: Room, committed: CommittedSamples | None
    ) -> tuple[Tally, float]:
        from stagetap.engine.session import CaptureSession

        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        engine_args = {
            "use_tqdm_on_load": False,
            # Prompts come as token ids; only generation asks the tokenizer where to end.
            "skip_tokenizer_init": not self.include_output,
            **self.engine_args,
        }
        with Interruption(_say_stopping) as interruption:
            with activity() as notify:
                ranks = f" of {self.tp} ranks" if self.tp > 1 else ""
                notify(f"starting vLLM, stages: {self.pp}{ranks}")
                session = CaptureSession(
                    self.model,
                    layers=self.layers,
                    store=self.target.out,
                    pp=self.pp,
                    tp=self.tp,
                    max_len=self.max_len,
                    run_id=self.target.run_id,
                    include_output=self.include_output,
                    engine_args=engine_args,
                )
            interruption.defer()
            try:
                if committed is not None:
                    committed.leave_note(self._asked)
                with CaptureProgress(len(prompts), guard) as progress:
                    capture = CaptureRun(
                        session,
                        prompts,
                        guard,
                        output_rows=self._output_rows,
                        wants_stop=lambda: interruption.requested,
                        on_sample=lambda captured: progress.show(capture.tally),
                    )
                    tally = capture.run(self.in_flight)
                    return tally, progress.seconds
            finally:
                session.close()


def _say_stopping() -> None:
    notes().print("\ninterrupted: what is in flight ends first; Ctrl-C again ends at once")
