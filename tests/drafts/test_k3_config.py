"""The config.json of a K3 draft: one meaning for every spelling, refusals for what is not built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from drafts.tiny_k3 import PUBLISHED, TINY, YARN, draft_config
from stagetap.drafts.k3_dspark import K3DSparkConfig, K3DSparkSpeculatorConfig
from stagetap.drafts.k3_dspark.rope import rope_parameters

OLD_YARN = {"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}}

SPELLINGS: dict[str, dict[str, Any]] = {
    "nested base": {"rope_parameters": {**YARN, "rope_theta": 50000.0}},
    "base at the top": {"rope_parameters": YARN, "rope_theta": 50000.0},
    "no base": {"rope_parameters": YARN},
    "nested base and another at the top": {
        "rope_parameters": {**YARN, "rope_theta": 50000.0},
        "rope_theta": 10000.0,
    },
    "transformers 4": {"rope_scaling": OLD_YARN, "rope_theta": 50000.0},
    "transformers 4, no base": {"rope_scaling": OLD_YARN},
    "rope_type in rope_scaling": {"rope_scaling": YARN, "rope_theta": 50000.0},
    "type beside rope_type": {"rope_scaling": {**YARN, "type": "yarn"}},
    "both": {"rope_parameters": {**YARN, "rope_theta": 50000.0}, "rope_scaling": OLD_YARN},
    "null beside": {"rope_parameters": YARN, "rope_scaling": None, "rope_theta": None},
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("reader", ["class", "auto", "speculators"])
def test_every_spelling_comes_through_a_file(spelling: str, reader: str, tmp_path: Path) -> None:
    """Read as it is spelled, written, and read again."""
    document = {**TINY, **SPELLINGS[spelling], "model_type": "k3_dspark"}
    (tmp_path / "config.json").write_text(json.dumps(document))
    for _ in range(2):
        if reader == "speculators":
            view = K3DSparkSpeculatorConfig.from_pretrained(tmp_path)
            config = view.transformer_layer_config
            view.save_pretrained(tmp_path)
        else:
            read = {"class": K3DSparkConfig, "auto": AutoConfig}[reader]
            config = read.from_pretrained(tmp_path)
            config.save_pretrained(tmp_path)
        assert type(config) is K3DSparkConfig
        assert config.rope_parameters == {**YARN, "rope_theta": 50000.0}
        assert {name: getattr(config, name) for name in TINY} == TINY
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_parameters"] == {**YARN, "rope_theta": 50000.0}
    assert "rope_theta" not in written
    assert "rope_scaling" not in written


def test_without_rope_parameters_the_base_is_vllms() -> None:
    assert draft_config().rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert draft_config(rope_theta=7.0).rope_parameters["rope_theta"] == 7.0


@pytest.mark.parametrize(
    ("parameters", "scaling", "says"),
    [
        ({**YARN, "factor": 8.0}, YARN, "factor is 8.0 in rope_parameters and 32.0"),
        ({"type": "yarn", "rope_type": "default"}, None, "keep `rope_type` alone"),
        ({"rope_type": "linear", "factor": 2.0}, None, "'linear' is not built"),
        ({**YARN, "attention_factor": 1.0}, None, "attention_factor"),
        ({**YARN, "truncate": False}, None, "truncate"),
        ({"full_attention": YARN}, None, "full_attention"),
        ({"rope_type": "yarn", "factor": 2.0}, None, "original_max_position_embeddings"),
        ({**YARN, "mscale": None}, None, "one of mscale and mscale_all_dim"),
    ],
)
def test_rotations_that_trainer_and_server_would_not_take_alike(
    parameters: Any, scaling: Any, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        rope_parameters(parameters, scaling)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"mla_use_qk_norm": True}, "mla_use_qk_norm"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"is_causal": True}, "is_causal"),
        ({"dflash_config": {"causal": True}}, "dflash_config.causal"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"dspark_bonus_anchor": True}, "dspark_bonus_anchor"),
        ({"sample_from_anchor": False}, "sample_from_anchor"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_routed_experts": 8}, "n_routed_experts"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"hidden_act": "situ"}, "hidden_act is 'situ'"),
        ({"sliding_window": 512}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ({"mask_token_id": 64}, "mask_token_id is 64, and must be below its vocab_size, 64"),
        ({"draft_vocab_size": 32}, "draft_vocab_size"),
        ({"target_hidden_size": 32}, "target_hidden_size"),
        ({"target_layer_ids": [2, 2]}, "3 is asked for more than once"),
        ({"num_target_layers": 3}, "num_target_layers"),
    ],
)
def test_what_is_not_built_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        draft_config(**changes)


@pytest.mark.parametrize(
    "field", ["target_layer_ids", "block_size", "mask_token_id", "markov_rank"]
)
def test_what_is_left_open_is_refused_by_the_model(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        K3DSparkSpeculatorConfig.of_draft(draft_config(**{field: None}))


def test_a_vocabulary_that_was_changed_later_is_refused() -> None:
    """speculators writes the target's vocabulary size into a draft's configuration."""
    config = draft_config()
    config.vocab_size = 128
    with pytest.raises(ValueError, match="draft_vocab_size is 64 and vocab_size 128"):
        K3DSparkSpeculatorConfig.of_draft(config)


def test_taps_are_one_more_than_layers() -> None:
    assert K3DSparkConfig(**PUBLISHED).tap_ids == [3, 24, 48, 72, 90]
    view = K3DSparkSpeculatorConfig.of_draft(draft_config())
    assert view.aux_hidden_state_layer_ids == [3, 1]  # in the order in which they are read


def test_vllm_reads_the_same(tmp_path: Path) -> None:
    """Its class of the same name, on a file that ours has written."""
    configs = pytest.importorskip("vllm.transformers_utils.configs.k3_dspark", reason="needs vLLM")
    K3DSparkSpeculatorConfig.of_draft(K3DSparkConfig(**PUBLISHED)).save_pretrained(tmp_path)
    theirs = configs.K3DSparkConfig.from_pretrained(tmp_path)
    for name, value in PUBLISHED.items():
        assert getattr(theirs, name) == value, name
    assert theirs.architectures == ["K3DSparkModel"]
    # And a file that leaves everything out but what both require.
    least = {"model_type": "k3_dspark", "target_layer_ids": [1], "num_target_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(least))
    theirs = configs.K3DSparkConfig.from_pretrained(tmp_path)
    ours = K3DSparkConfig.from_pretrained(tmp_path)
    for name in ("rms_norm_eps", "rope_parameters", "hidden_size", "num_attention_heads"):
        assert getattr(theirs, name) == getattr(ours, name), name
