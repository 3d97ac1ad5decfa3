"""Features of vLLM that no engine has beside a capture. Pure.

One table for all who refuse them: the engine on its finished configuration, the doctor in a file
for ``vllm serve --config`` and among what a recipe hands on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stagetap.errors import Refused


@dataclass(frozen=True)
class Feature:
    """One of them.

    Attributes:
        flags: those of ``vllm serve`` that ask for it.
        refused: why it is refused, and the cure.
    """

    flags: tuple[str, ...]
    refused: str


SPECULATION = Feature(
    ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
    "capture beside speculative decoding is not in this version; drop --speculative-config "
    "(StageTap itself needs none)",
)
SLEEP_MODE = Feature(
    ("--enable-sleep-mode",),
    "sleep mode takes the pages of requests under way and is not in this version; drop "
    "--enable-sleep-mode",
)
WEIGHT_TRANSFER = Feature(
    ("--weight-transfer-config",),
    "weight updates would make manifests name other weights than were run; drop "
    "--weight-transfer-config and start an engine per checkpoint",
)
LORA = Feature(
    ("--enable-lora", "--lora-modules", "--default-mm-loras"),
    "capture with LoRA adapters is not in this version; drop --enable-lora",
)
MICROBATCHES = Feature(
    ("--enable-dbo", "--ubatch-size"),
    "microbatching splits a step's rows; drop --enable-dbo and ubatch sizes",
)
KV_OFFLOADING = Feature(
    ("--kv-offloading-size",),
    "vLLM would put its offloading connector in the place of StageTap's and capture nothing; drop "
    "--kv-offloading-size",
)
NO_GENERATION = Feature(
    ("--runner", "--convert"),
    "an engine that generates nothing has no prompts to capture; say --runner generate, or leave "
    "the argument out",
)
OTHER_SCHEDULER = Feature(
    ("--scheduler-cls",),
    "another scheduler would not hold an output back until its sample is committed; drop "
    "--scheduler-cls",
)
OTHER_WORKER = Feature(
    ("--worker-cls",),
    "StageTap stands in for the workers of vLLM's CPU and CUDA platforms alone; drop --worker-cls, "
    "or use one of these platforms",
)

FEATURES = (
    *(SPECULATION, SLEEP_MODE, WEIGHT_TRANSFER, LORA, MICROBATCHES, KV_OFFLOADING),
    *(NO_GENERATION, OTHER_SCHEDULER, OTHER_WORKER),
)


def check_features(asked: Mapping[Feature, bool]) -> None:
    """Raises Refused for the first feature that an engine is asked for."""
    for feature, is_asked in asked.items():
        if is_asked:
            raise Refused(feature.refused)
