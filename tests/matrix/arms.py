"""One capture by the production command, with one core a rank and the shims of the tests."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from stagetap.engine.environment import BINDING_ENV, cores_by_rank
from stagetap.equivalence.arms import Arm

TESTS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class MatrixArm(Arm):
    """An arm whose ranks have one core each, whatever the layout.

    vLLM's attention on CPU splits its sums by threads: with equal shares, one single-stage
    reference serves all rows of a model.

    Attributes:
        shims: names of what the engine needs of ``tests/shims``.
    """

    shims: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        environment = super().environment()
        ranks = self.pp * self.tp
        cores = max(ranks, len(os.sched_getaffinity(0)))
        environment[BINDING_ENV] = cores_by_rank(ranks, cores)
        environment["STAGETAP_SHIMS"] = ",".join(self.shims)
        environment["PYTHONPATH"] = os.pathsep.join([str(TESTS / "shims"), str(TESTS)])
        return environment


@dataclass(frozen=True)
class PictureArm(MatrixArm):
    """The same for prompts of which one has an image: ``stagetap capture`` takes none."""

    def command(self, prompts: Path, out: Path) -> list[str]:
        arguments = super().command(prompts, out)
        return [sys.executable, "-m", "matrix.picture_arm", *arguments[4:]]
