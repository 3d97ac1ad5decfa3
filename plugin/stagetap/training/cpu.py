"""speculators' trainer on a machine without an accelerator, which 0.9.0 does not foresee.

Its trainer places the model at the index of the local rank, autocasts for ``cuda`` where there is
no accelerator, and waits for one around each phase of a step. No option changes any of it. Drafts
of small targets train on a CPU all the same, so these four places are set to the CPU.
"""

from __future__ import annotations

from typing import Any

import torch


def use_cpu_without_accelerator() -> None:
    """Let the trainer of this process run on the CPU, if there is nothing else."""
    if torch.accelerator.current_accelerator() is not None:
        return
    from speculators.train import checkpointer, trainer

    trainer.get_local_rank = lambda: "cpu"
    trainer.Trainer.device_type = property(lambda self: "cpu", _ignore)
    checkpointer.get_current_device = lambda: "cpu"
    torch.accelerator.synchronize = _nothing_to_wait_for


def _ignore(trainer: Any, device_type: str) -> None:
    """The trainer's own choice."""


def _nothing_to_wait_for(device: Any = None) -> None:
    """A CPU has done what it was told when the call returns."""
