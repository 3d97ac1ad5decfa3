"""Values of a K3 draft's config.json: what is refused, and that what is not means the same to all.

Held against vLLM's own class of this draft and its rotary embeddings, on a CPU.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts.tiny_k3 import TINY, YARN, draft_config
from stagetap.drafts.k3_dspark import K3DSparkConfig
from stagetap.drafts.k3_dspark.attention import K3DSparkMLAAttention, K3DSparkRotaryEmbedding
from stagetap.layer_choice import DRAFT_KEYS

NAN = float("nan")
A_SIZE = (0, -1, 7.5, 8.0, "8", True, [8], 2**31)
A_SWITCH = ("false", "true", 0, 1, None)
A_NUMBER = (NAN, float("inf"), "32", True, 0, -1, 10**400)

WRONG: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        [
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"),
            *("qk_rope_head_dim", "v_head_dim", "max_position_embeddings", "block_size"),
            *("markov_rank", "target_hidden_size", "draft_vocab_size", "num_target_layers"),
            *("head_dim", "qk_head_dim"),
        ],
        A_SIZE,
    ),
    **dict.fromkeys(
        [
            *("fc_norm", "enable_confidence_head", "confidence_head_with_markov"),
            *("mla_use_output_gate", "mla_use_nope", "mla_use_qk_norm", "dspark_bonus_anchor"),
            *("sample_from_anchor", "attention_bias", "rope_interleave"),
        ],
        A_SWITCH,
    ),
    "qk_rope_head_dim ": (7,),
    "num_hidden_layers ": (1001,),
    "mask_token_id": (-1, 64, "5", 5.0, True),
    "target_layer_ids": ([], [-1, 2], [True, 2], [2.0], "2", (2, 0)),
    "rms_norm_eps": (*A_NUMBER, 1),
    "rope_theta": (*A_NUMBER, 1),
    "qk_head_dim ": (128,),
    "partial_rotary_factor": (0.5, 1.0),
    "original_max_position_embeddings": (64,),
    "rope_parameters": ("yarn", [YARN], 5),
    "rope_scaling": ("yarn", [YARN], 5),
    "dtype": ("bfloat61", 16, "int8"),
    "architectures": ("K3DSparkModel",),
    "dflash_config": ([], "x"),
    "eagle_config": ([], "x"),
}
WRONG_ROPE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(["factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"], A_NUMBER),
    "rope_theta": (*A_NUMBER, 1),
    "original_max_position_embeddings": A_SIZE,
    "rope_type": (["yarn"], 5),
}


def refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as refused:
        draft_config(**changes)
    return str(refused.value)


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_value_is_one_line_that_names_it(field: str) -> None:
    name = field.strip()
    for value in WRONG[field]:
        said = refusal({name: value})
        assert said.startswith(f"a K3 draft's {name}"), said
        assert "should" in said or "must" in said or "built" in said, said


@pytest.mark.parametrize("field", WRONG_ROPE)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_a_wrong_rotary_value_is_one_line_that_names_it(field: str, spelling: str) -> None:
    for value in WRONG_ROPE[field]:
        said = refusal({spelling: {**YARN, field: value}})
        assert said.startswith(f"a K3 draft's rope_parameters.{field} is "), said


def test_null_beside_a_rotary_value_is_nothing() -> None:
    """transformers would write it over the number in ``rope_parameters`` in the forward pass."""
    config = draft_config(rope_parameters=dict(YARN), original_max_position_embeddings=None)
    K3DSparkRotaryEmbedding(config)(torch.empty(0), torch.tensor([[0, 1]]))
    assert config.rope_parameters == {**YARN, "rope_theta": 50000.0}


def test_no_scale_of_the_angles_is_zero() -> None:
    """transformers takes two zeros for nothing given, vLLM for a magnitude of 1."""
    for zero in (0, 0.0):
        said = refusal({"rope_parameters": {**YARN, "mscale": zero, "mscale_all_dim": zero}})
        assert "mscale is 0" in said


TAPS = [3, 1]  # of TINY's target_layer_ids
OTHER_KEYS = [key for key in DRAFT_KEYS if key.name != "target_layer_ids"]


@pytest.mark.parametrize("key", OTHER_KEYS, ids=lambda key: key.name)
def test_keys_of_other_drafts_must_mean_the_same_taps(key: Any) -> None:
    """By the rule that ``stagetap doctor`` and ``--layers FILE`` have."""

    def spelled(ids: list[int]) -> dict[str, Any]:
        value: Any = [tap - key.offset for tap in ids]
        for name in reversed(key.path):
            value = {name: value}
        return dict(value)

    assert draft_config(**spelled(TAPS)).tap_ids == TAPS
    for other in ([3, 2], [1, 3], [3]):
        said = refusal(spelled(other))
        assert "contradicts itself" in said
        assert f"{key.name} means the ids {other}" in said


def test_vllms_other_mask_token_must_be_the_same() -> None:
    assert draft_config(dflash_config={"mask_token_id": 63}).mask_token_id == 63
    said = refusal({"dflash_config": {"mask_token_id": 5}})
    assert said == "a K3 draft's dflash_config.mask_token_id is 5, and must be mask_token_id, 63"
    assert "must be mask_token_id" in refusal(
        {"dflash_config": {"mask_token_id": 5}, "mask_token_id": None}
    )
    for value in ("63", None, 63.0):
        assert "dflash_config.mask_token_id is" in refusal(
            {"dflash_config": {"mask_token_id": value}}
        )


def served(config: Any) -> tuple[torch.Tensor, float]:
    """vLLM's table ``[positions, R]`` and softmax scale, as ``kimi_k3/nvidia/mla.py`` makes them.

    Its class itself has kernels that only a GPU runs.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import yarn_get_mscale

    parameters = dict(config.rope_parameters)
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    if parameters["rope_type"] != "default":
        parameters["rope_type"] = "deepseek_yarn"
        all_dim = parameters.get("mscale_all_dim", False)
        scale *= yarn_get_mscale(parameters["factor"], float(all_dim)) ** 2
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            config.qk_rope_head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=parameters,
            is_neox_style=False,
            dtype=torch.float32,
        )
    return rope.cos_sin_cache, scale


def served_taps(config: Any) -> list[int]:
    from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
        get_eagle3_aux_layers_from_config,
    )

    drafter = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    return list(get_eagle3_aux_layers_from_config(drafter) or ())


def read(document: dict[str, Any]) -> tuple[K3DSparkConfig | None, str]:
    """A configuration, or why there is none."""
    try:
        return K3DSparkConfig(**document), ""
    except ValueError as error:
        return None, str(error)


def without_version(config: K3DSparkConfig) -> dict[str, Any]:
    return {k: v for k, v in config.to_dict().items() if k != "transformers_version"}


VALUES = st.sampled_from(
    [0, 1, 2, 3, 8, 12, 63, 64, -1, 0.5, 1.0, NAN, "8", "", True, False, None, [], {}, [2, 0], [1]]
)
RIGHT_ROPES = st.fixed_dictionaries(
    {
        "rope_type": st.just("yarn"),
        "factor": st.sampled_from([1, 1.5, 4, 32.0]),
        "original_max_position_embeddings": st.sampled_from([1, 16, 64]),
    },
    optional={
        "rope_theta": st.sampled_from([1.5, 2, 50000.0, 1e12, None]),
        "beta_fast": st.sampled_from([32, 0.5, 1]),
        "beta_slow": st.sampled_from([1, 0.25, 32]),
        "mscale": st.sampled_from([1, 0.5, None]),
        "mscale_all_dim": st.sampled_from([1, 0.7, None]),
    },
)
ODD_ROPES = st.dictionaries(
    st.sampled_from([*YARN, "rope_theta", "partial_rotary_factor", "attention_factor"]),
    st.sampled_from([0, 0.0, 1, 0.5, 8.0, -1, NAN, "4", None, "default", "linear", False]),
    max_size=2,
)
NAMES = [*TINY, *(name.strip() for name in WRONG), "sliding_window", "layer_types", "num_experts"]
ODD = st.one_of(st.just({}), st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2))
FOREIGN = st.dictionaries(
    st.sampled_from(["eagle_aux_hidden_state_layer_ids", "dspark_target_layer_ids"]),
    st.sampled_from([[3, 1], [2, 0], None]),
    max_size=1,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(ODD, RIGHT_ROPES, st.one_of(st.just({}), ODD_ROPES), FOREIGN)
def test_what_is_accepted_comes_back_and_means_the_same_to_vllm(
    changes: dict[str, Any], rope: dict[str, Any], odd: dict[str, Any], foreign: dict[str, Any]
) -> None:
    configs = pytest.importorskip("vllm.transformers_utils.configs.k3_dspark", reason="needs vLLM")
    document = {
        **TINY,
        "max_position_embeddings": 64,
        "rope_parameters": {**rope, **odd},
        **changes,
        **foreign,
    }
    config, refused = read(document)
    if config is None:
        assert "\n" not in refused
        return
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        again = K3DSparkConfig.from_pretrained(folder)
        assert without_version(again) == without_version(config)
        assert json.loads((Path(folder) / "config.json").read_text())["model_type"] == "k3_dspark"
        if config.target_layer_ids is None:
            return
        theirs = configs.K3DSparkConfig.from_pretrained(folder)
    assert served_taps(theirs) == config.tap_ids
    table, scale = served(theirs)
    assert K3DSparkMLAAttention(config, 0).scaling == pytest.approx(scale, rel=1e-12)
    positions = torch.arange(min(len(table), 2048))
    cos, sin = K3DSparkRotaryEmbedding(config)(torch.empty(0), positions[None])
    # Frequencies of one unit in the last place apart are 0.0003 radians apart at position 2048.
    torch.testing.assert_close(
        torch.cat((cos[0], sin[0]), -1), table[: len(positions)], rtol=0, atol=1e-3
    )


@pytest.mark.parametrize("head_dim", [128, 192, None])
def test_a_head_dim_that_nothing_is_as_wide_as_changes_nothing(head_dim: int | None) -> None:
    config = draft_config(head_dim=head_dim, rope_parameters=YARN)
    assert config.head_dim == config.qk_rope_head_dim
    positions = torch.arange(4)[None]
    turned = K3DSparkRotaryEmbedding(config)(torch.empty(0), positions)
    plain = K3DSparkRotaryEmbedding(draft_config(rope_parameters=YARN))(torch.empty(0), positions)
    assert all(map(torch.equal, turned, plain))


@pytest.mark.parametrize("rope", [{}, YARN, {k: YARN[k] for k in YARN if "mscale" not in k}])
def test_the_rotary_table_is_vllms(rope: dict[str, Any]) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    small = {"original_max_position_embeddings": 64} if rope else {}
    config = draft_config(rope_parameters={**rope, **small}, max_position_embeddings=2048)
    table, scale = served(config)
    assert K3DSparkMLAAttention(config, 0).scaling == pytest.approx(scale, rel=1e-12)
    assert table.shape == (2048, config.qk_rope_head_dim)
    cos, sin = K3DSparkRotaryEmbedding(config)(torch.empty(0), torch.arange(2048)[None])
    torch.testing.assert_close(torch.cat((cos[0], sin[0]), -1), table, rtol=0, atol=1e-3)
