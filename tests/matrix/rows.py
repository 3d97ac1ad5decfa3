"""What is tried. Everything here is a claim; the runner finds out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from checkpoints import FAMILIES

Verdict = Literal["bitwise", "bounded", "refused"]

REAL_MODEL = "smollm2"
CHUNK = 64
"""Tokens of a step where prefill may be cut: the longest prompt takes seven."""


@dataclass(frozen=True)
class Model:
    """A checkpoint, and how its engine is started.

    Attributes:
        name: the name of its rows.
        family: of :data:`checkpoints.FAMILIES`, or :data:`REAL_MODEL`.
        engine_args: always, such as another implementation.
        chunked: whether its attention can go on in the middle of a prompt; a step takes
            :data:`CHUNK` tokens then.
        picture: whether one prompt has an image.
        shims: of ``tests/shims``, what its engine needs beyond vLLM's CPU build.
    """

    name: str
    family: str
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    chunked: bool = True
    picture: bool = False
    shims: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """One layout of one model, compared with one stage of the same tensor-parallel size.

    Attributes:
        model: of :data:`MODELS`.
        options: what is special, in words; part of the row's identity.
        engine_args: what brings that about.
        shims: what that needs beside the model's own.
        expect: the verdict that is no failure.
        against_one_rank: compare ``tp`` ranks on one stage with one rank instead.
        bound: the largest relative error that is ``bounded``; None: bits must be equal.
        hf_bound: the largest error against the Hugging Face forward, of any token in float32; None:
            twice what transformers itself loses by rounding as the row's engine does.
        refusal: what the line of an expected refusal says.
        note: what a reader of the table should know.
    """

    model: str
    pp: int = 2
    tp: int = 1
    dtype: str = "bfloat16"
    options: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    shims: tuple[str, ...] = ()
    expect: Verdict = "bitwise"
    against_one_rank: bool = False
    bound: float | None = None
    hf_bound: float | None = None
    refusal: str = ""
    note: str = ""

    @property
    def key(self) -> tuple[str, int, int, str, str]:
        """What tells rows apart."""
        return (self.model, self.pp, self.tp, self.dtype, self.options)

    @property
    def fp8_cache(self) -> bool:
        """Whether keys and values are stored in fp8."""
        return self.engine_args.get("kv_cache_dtype") == "fp8"

    @property
    def name(self) -> str:
        """The row in a few words, as progress and findings name it."""
        words = [self.model, f"PP={self.pp}", f"TP={self.tp}", self.dtype, self.options]
        return " ".join(word for word in words if word)


MODELS = {
    model.name: model
    for model in (
        Model("smollm2", REAL_MODEL),
        Model("llama", "llama"),
        Model("mistral", "mistral"),
        Model("qwen2", "qwen2"),
        Model("qwen3", "qwen3"),
        Model("qwen3-moe", "qwen3-moe"),
        Model("glm4", "glm4"),
        Model("granite", "granite"),
        Model("cohere", "cohere"),
        Model("gpt-oss", "gpt-oss"),
        Model("gemma3", "gemma3"),
        Model("gemma4", "gemma4"),
        Model("qwen3-next", "qwen3-next"),
        Model("deepseek-v3", "deepseek-v3", chunked=False, shims=("native-rotation-of-heads",)),
        Model("transformers-backend", "llama", {"model_impl": "transformers"}),
        Model("qwen2.5-vl", "qwen2.5-vl", picture=True, shims=("still-images",)),
        Model(
            "qwen3-vl",
            "qwen3-vl",
            picture=True,
            shims=("still-images", "native-position-interpolation"),
        ),
        Model("llama-int8", "llama-int8"),
        Model("llama-calm", "llama-calm"),
        Model("qwen3-moe-calm", "qwen3-moe-calm"),
    )
}

EXACT = ("llama", "granite", "cohere", "gpt-oss", "gemma3", "deepseek-v3", "qwen3-vl")
"""Models that are tried in float32 too, where rounding hides nothing and every token counts. On CPU
the linear attention of Qwen3-Next is built for bfloat16 alone."""

VARIANTS = {"llama-int8", "llama-calm", "qwen3-moe-calm"}
"""Models that are tried for one thing alone."""

_EXPERT_PARALLEL: dict[str, Any] = {
    "options": "expert parallel",
    "engine_args": {"enable_expert_parallel": True},
    "shims": ("own-experts-alone",),
}
_FP32: dict[str, Any] = {"dtype": "float32", "hf_bound": 1e-4}
TP_BOUND_BF16, TP_BOUND_FP32 = 1e-2, 1e-5

ROWS = (
    *(Row(name) for name in MODELS if name not in VARIANTS),
    Row("llama", pp=3),
    Row("granite", pp=3),
    Row("gemma3", pp=3),
    # Pages of the tap cache then hold any number of tokens.
    Row("gemma3", options="no prefix cache", engine_args={"enable_prefix_caching": False}),
    Row("llama-int8", options="int8 weights"),
    Row("llama", dtype="float16"),
    *(Row(name, **_FP32) for name in EXACT),
    Row("llama", options="fp8 KV cache", engine_args={"kv_cache_dtype": "fp8"}),
    Row("llama", tp=2),
    Row("llama-calm", pp=1, tp=2, against_one_rank=True, expect="bounded", bound=TP_BOUND_BF16),
    Row(
        "llama-calm",
        pp=1,
        tp=2,
        against_one_rank=True,
        expect="bounded",
        bound=TP_BOUND_FP32,
        **_FP32,
    ),
    Row("qwen3-moe", tp=2, **_EXPERT_PARALLEL),
    Row(
        "qwen3-moe-calm",
        pp=1,
        tp=2,
        against_one_rank=True,
        expect="bounded",
        bound=TP_BOUND_BF16,
        **_EXPERT_PARALLEL,
    ),
    Row(
        "qwen3-moe",
        pp=1,
        tp=2,
        against_one_rank=True,
        expect="bounded",
        bound=TP_BOUND_FP32,
        **_EXPERT_PARALLEL,
        **_FP32,
    ),
)


def selected(names: list[str]) -> list[Row]:
    """The rows of the named models, all when none is named.

    Raises:
        ValueError: a name of no model.
    """
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise ValueError(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    return [row for row in ROWS if not names or row.model in names]


def layer_ids(num_hidden_layers: int) -> list[int]:
    """Every id, and no order that a mistake could hide behind: N, 0, the middle, then the rest."""
    first = [num_hidden_layers, 0, num_hidden_layers // 2]
    return first + [k for k in reversed(range(num_hidden_layers)) if k not in first]


assert all(model.family in {*FAMILIES, REAL_MODEL} for model in MODELS.values())
