"""What configurations leave to their classes: the classes are transformers' own."""

from __future__ import annotations

from typing import Any

import pytest

from stagetap.errors import Refused
from stagetap.plan.defaults import CHECKED, IDENTITY, READ, class_of_transformers
from stagetap.plan.read_model import CHECKED_TYPES, read_model
from unit.plan.targets import LLAMA, MOE

VLLMS_OWN = {"kimi_k3", "kimi_linear"}


def without(config: dict[str, Any], *keys: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**config, **changes}.items() if key not in keys}


@pytest.mark.parametrize("model_type", sorted({*CHECKED} - VLLMS_OWN))
def test_the_table_is_what_transformers_says(model_type: str) -> None:
    found = class_of_transformers(model_type)
    assert found is not None
    read = {
        name: value
        for name, value in found.values.items()
        if name in READ and name not in IDENTITY and value is not None
    }
    here = CHECKED[model_type]
    assert here.values == read
    assert here.decoder == found.decoder
    assert here.aliases == {
        name: key for name, key in found.aliases.items() if {name, key} & {*read} and name in READ
    }


def test_every_checked_type_has_its_defaults() -> None:
    assert set(CHECKED) >= CHECKED_TYPES


@pytest.mark.parametrize(
    ("model_type", "tied"),
    [("gemma3_text", True), ("gemma2", True), ("cohere", True), ("llama", False)],
)
def test_the_head_is_tied_where_the_class_ties(model_type: str, tied: bool) -> None:
    assert read_model({**LLAMA, "model_type": model_type}).tied is tied
    said = {"model_type": model_type, "tie_word_embeddings": not tied}
    assert read_model({**LLAMA, **said}).tied is not tied


def test_what_surrounds_a_decoder_says_whether_it_is_tied() -> None:
    text = without(LLAMA, "dtype", model_type="gemma3_text")
    outer = {"model_type": "gemma3", "text_config": text, "dtype": "bfloat16"}
    assert read_model(outer).tied
    assert not read_model({**outer, "tie_word_embeddings": False}).tied
    # vLLM hands the outer value on, whatever the decoder says.
    assert read_model({**outer, "text_config": {**text, "tie_word_embeddings": False}}).tied


def test_a_class_that_nobody_knows_is_not_guessed() -> None:
    novel = {**LLAMA, "model_type": "novel"}
    for config in (novel, {**novel, "tie_word_embeddings": None}):
        with pytest.raises(Refused, match=r"tie_word_embeddings, .*'novel' is not known .* write"):
            read_model(config)


def test_sizes_that_a_release_leaves_to_its_class() -> None:
    """Gemma 3 4B, as it was released: heads and vocabulary stand nowhere."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    released = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}
    model = read_model(released)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
    whole = {**text, **heads, "vocab_size": 262208, "max_position_embeddings": 131072}
    assert model.parameters() == read_model({**released, "text_config": whole}).parameters()
    assert "num_attention_heads 8, num_key_value_heads 4, head_dim 256" in model.remarks[0]
    flat = {key: value for key, value in released.items() if key != "text_config"}
    nameless = {**flat, "text_config": without(text, "model_type")}
    assert read_model(nameless).parameters() == model.parameters()


def test_experts_that_a_release_leaves_to_its_class() -> None:
    silent = without(MOE, "num_experts", "moe_intermediate_size")
    said = {**silent, "num_experts": 128, "moe_intermediate_size": 768}
    assert read_model(silent).parameters() == read_model(said).parameters()
    other_name = {**silent, "num_local_experts": 8, "moe_intermediate_size": 64}
    assert read_model(other_name).parameters() == read_model(MOE).parameters()


@pytest.mark.parametrize("key", sorted(IDENTITY))
def test_what_says_which_model_it_is_has_no_default(key: str) -> None:
    with pytest.raises(Refused, match=f"says no {key}"):
        read_model(without(LLAMA, key))
