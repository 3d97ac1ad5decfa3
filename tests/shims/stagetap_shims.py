"""A vLLM plugin for tests: what some models of the matrix need beyond vLLM's CPU build.

Tests put this folder on PYTHONPATH, so vLLM loads it in each of its processes; the variable
STAGETAP_SHIMS names what an engine needs, between commas. No shim touches StageTap or what it
captures, and each says why it is needed.
"""

from __future__ import annotations

import os

SHIMS_ENV = "STAGETAP_SHIMS"


def register() -> None:
    """The plugin's entry point."""
    for name in filter(None, os.environ.get(SHIMS_ENV, "").split(",")):
        _SHIMS[name]()


def _still_images() -> None:
    """Qwen-VL models without torchvision."""
    import still_images

    still_images.register()


def _native_position_interpolation() -> None:
    """Qwen3-VL interpolates positions in a Triton kernel; the CPU's interpreter makes it NaN."""
    from vllm.model_executor.models import qwen3_vl

    qwen3_vl.HAS_TRITON = False


_SHIMS = {
    "still-images": _still_images,
    "native-position-interpolation": _native_position_interpolation,
}
