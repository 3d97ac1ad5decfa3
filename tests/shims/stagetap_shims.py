"""A vLLM plugin for tests: what tiny models of the matrix need beyond vLLM's CPU build.

Tests put this folder on PYTHONPATH, so vLLM loads it in each of its processes. None of it touches
StageTap or what it captures; each shim says why it is needed.
"""

from __future__ import annotations


def register() -> None:
    """The plugin's entry point."""
    import still_images

    still_images.register()
    _native_position_interpolation()


def _native_position_interpolation() -> None:
    """Qwen3-VL interpolates positions in a Triton kernel; the CPU's interpreter makes it NaN."""
    from vllm.model_executor.models import qwen3_vl

    qwen3_vl.HAS_TRITON = False
