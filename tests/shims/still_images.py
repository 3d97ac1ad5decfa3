"""Qwen-VL models on machines without torchvision, which does not import beside a CPU torch.

Two things want it. vLLM imports a resize rule from a module of transformers that imports it at its
top; the rule itself does not use it. And transformers builds the processors of these models only
with a video processor, and its own ones are made of it; images have a processor on PIL. So the
modules are imported once over an empty stand-in, and the tiny checkpoints name a video processor
that knows no video, registered with transformers as any foreign class is.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from transformers import PreTrainedConfig, processing_utils
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.processing_utils import VideosKwargs
from transformers.video_processing_utils import VideoProcessorMixin

_WANT_TORCHVISION = (
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
    "transformers.models.qwen3_vl.video_processing_qwen3_vl",
)


class StillImagesConfig(PreTrainedConfig):
    """What the registry wants as a key."""

    model_type = "still_images"


class StillImagesVideoProcessor(VideoProcessorMixin):
    """Has the sizes that are asked for beside images, and refuses a video."""

    valid_kwargs = VideosKwargs
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("tiny vision models get no videos")


def register() -> None:
    """Make both known to this process; again does nothing."""
    # Where processors look up the class that a video processor must be of.
    processing_utils.transformers_module.VideoProcessorMixin = VideoProcessorMixin
    AutoVideoProcessor.register(StillImagesConfig, StillImagesVideoProcessor, exist_ok=True)
    if find_spec("torchvision") is None:
        _import_over_a_stand_in()


def _import_over_a_stand_in() -> None:
    names = ("", ".transforms", ".transforms.v2", ".transforms.v2.functional")
    stand_ins = {f"torchvision{name}": ModuleType(f"torchvision{name}") for name in names}
    for name, module in stand_ins.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(stand_ins[parent], child, module)
    sys.modules |= stand_ins
    try:
        for wanted in _WANT_TORCHVISION:
            importlib.import_module(wanted)
    finally:
        for name in stand_ins:
            del sys.modules[name]
