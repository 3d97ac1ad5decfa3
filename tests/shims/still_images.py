"""A video processor that knows no video, for tiny vision models on machines without torchvision.

transformers builds the processors of Qwen-VL models only with a video processor, and its own ones
want torchvision, which does not import beside a CPU build of torch. Images need neither: their
processor has a form on PIL. Checkpoints of `checkpoints.py` name this class in
video_preprocessor_config.json; it is registered with transformers as any foreign class is.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, processing_utils
from transformers.models.auto.video_processing_auto import AutoVideoProcessor
from transformers.processing_utils import VideosKwargs
from transformers.video_processing_utils import VideoProcessorMixin


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
    """Make the class known to transformers, once a process."""
    # Where processors look up the class that a video processor must be of.
    processing_utils.transformers_module.VideoProcessorMixin = VideoProcessorMixin
    AutoVideoProcessor.register(StillImagesConfig, StillImagesVideoProcessor, exist_ok=True)
