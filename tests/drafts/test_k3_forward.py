"""What a K3 draft computes: held against plain loops, numeric gradients and enumerated masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafts import reference_k3
from drafts.tiny_k3 import PUBLISHED, YARN, draft, draft_config
from stagetap.drafts.k3_dspark import (
    K3DSparkConfig,
    K3DSparkMLAAttention,
    K3DSparkModel,
    K3DSparkSpeculatorConfig,
)
from stagetap.drafts.k3_dspark.attention import K3DSparkRotaryEmbedding

DOCUMENTS = torch.tensor([[0] * 6 + [1] * 8 + [-1] * 2])  # two documents and padding
POSITIONS = torch.tensor([[*range(4000, 4006), *range(8), 0, 0]])
LOSS_MASK = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0]])


def inputs(model: Any, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, width = DOCUMENTS.shape[1], model.hidden_size
    taps = torch.randn(1, tokens, len(model.target_layer_ids) * width, generator=generator)
    return {
        "hidden_states": taps * 3,
        "input_ids": torch.randint(0, 63, (1, tokens), generator=generator),
        "loss_mask": LOSS_MASK,
        "verifier_last_hidden_states": torch.randn(1, tokens, width, generator=generator),
        "document_ids": DOCUMENTS,
        "position_ids": POSITIONS,
    }


def every_anchor(model: Any) -> list[int]:
    """The anchors that speculators takes when it may take all."""
    last = DOCUMENTS.shape[1] - model.block_size
    return [i for i in range(last) if LOSS_MASK[0, i]]


def states_by_loops(model: Any, given: dict[str, torch.Tensor], rope: dict[str, Any]) -> Any:
    weights, config = model.state_dict(), model.config.transformer_layer_config
    states = []
    for anchor in every_anchor(model):
        before = [i for i in range(anchor) if DOCUMENTS[0, i] == DOCUMENTS[0, anchor]]
        states += reference_k3.block_states(
            weights,
            config,
            rope,
            [given["hidden_states"][0, i].double().tolist() for i in before],
            [int(POSITIONS[0, i]) for i in before],
            int(given["input_ids"][0, anchor]),
            int(POSITIONS[0, anchor]),
        )
    return torch.tensor(states, dtype=torch.float64)


ROPES = {
    "yarn": {**YARN, "rope_theta": 50000.0, "original_max_position_embeddings": 64},
    "default": {"rope_type": "default", "rope_theta": 50000.0},
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("fc_norm", [False, True])
def test_the_forward_pass_is_that_of_plain_loops(rope: str, fc_norm: bool) -> None:
    model = draft(rope_parameters=dict(ROPES[rope]), fc_norm=fc_norm)
    given = inputs(model)
    anchors = every_anchor(model)
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(**given, max_anchors=len(anchors))
    expected = states_by_loops(model, given, ROPES[rope])
    torch.testing.assert_close(hidden[0].double(), expected, rtol=0, atol=1e-4)
    head = model.lm_head.weight.double()
    torch.testing.assert_close(logits[0].double(), expected @ head.T, rtol=0, atol=2e-4)


def test_another_base_would_be_seen() -> None:
    """transformers' own 10000 instead of 50000 is far outside of the tolerance above."""
    model = draft(rope_parameters=dict(ROPES["yarn"]))
    given = inputs(model)
    right = states_by_loops(model, given, ROPES["yarn"])
    for change in ({"rope_theta": 10000.0}, {"factor": 31.0}, {"mscale_all_dim": 0.0}):
        wrong = states_by_loops(model, given, {**ROPES["yarn"], **change})
        assert (wrong - right).abs().max() > 2e-3


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {**YARN, "rope_theta": 50000.0}},
        {"rope_parameters": YARN, "rope_theta": 50000.0},
        {"rope_scaling": YARN},
    ],
)
def test_the_published_scale_and_angles(spelling: dict[str, Any]) -> None:
    published = {k: v for k, v in PUBLISHED.items() if k != "rope_parameters"}
    small = {"hidden_size": 8, "q_lora_rank": 2, "kv_lora_rank": 2, "num_attention_heads": 1}
    config = K3DSparkConfig(**{**published, **small, **spelling})
    assert K3DSparkMLAAttention(config, 0).scaling == pytest.approx(0.13086080, abs=5e-9)
    positions = torch.tensor([[0, 1, 1000, 200_000]])
    cos, sin = K3DSparkRotaryEmbedding(config)(torch.empty(0, dtype=torch.bfloat16), positions)
    assert cos.dtype == sin.dtype == torch.float32
    rope = {**YARN, "rope_theta": 50000.0}
    inverse = torch.tensor(reference_k3.frequencies(64, rope), dtype=torch.float64)
    angles = positions[..., None].double() * inverse
    # One unit in the last place of a frequency is 0.012 radians at position 200,000.
    torch.testing.assert_close(cos[:, :3].double(), angles[:, :3].cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sin.double(), angles.sin(), rtol=0, atol=0.03)
    other = torch.tensor(reference_k3.frequencies(64, {**rope, "rope_theta": 10000.0}))
    assert ((1000 * inverse).cos() - (1000 * other).cos()).abs().max() > 0.5


def test_angles_stay_in_float32_in_a_bfloat16_model() -> None:
    model = draft().to(torch.bfloat16)
    positions = torch.arange(3000, 3004)[None]
    angles = model.rotary_emb(torch.empty(0, dtype=torch.bfloat16), positions)
    exact = draft().rotary_emb(torch.empty(0), positions)
    assert all(torch.equal(a, b) for a, b in zip(angles, exact, strict=True))


def test_gradients_of_the_attention() -> None:
    """Numeric against analytic, in float64, for both inputs and every weight."""
    small = {"hidden_size": 4, "q_lora_rank": 3, "kv_lora_rank": 3, "qk_nope_head_dim": 2}
    config = draft_config(
        **small, qk_rope_head_dim=4, v_head_dim=2, rope_parameters=dict(ROPES["yarn"])
    )
    torch.manual_seed(0)
    attention = K3DSparkMLAAttention(config, 0).double()
    block = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    context = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)
    positions = torch.tensor([[900, 901, 902, 903, 904]])
    embeddings = K3DSparkRotaryEmbedding(config)(block, positions)
    mask = torch.ones(1, 1, 2, 5, dtype=torch.bool)
    mask[..., 2] = False
    names = [name for name, _ in attention.named_parameters()]

    def attend(block: torch.Tensor, context: torch.Tensor, *weights: torch.Tensor) -> Any:
        return torch.func.functional_call(
            attention,
            dict(zip(names, weights, strict=True)),
            (block, context, embeddings, mask),
        )[0]

    assert torch.autograd.gradcheck(attend, (block, context, *attention.parameters()))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_the_mask_by_enumeration(implementation: str) -> None:
    """Context of the same document before the anchor, the own block whole, nothing else."""
    config = draft_config()
    config._attn_implementation = implementation
    model = K3DSparkModel(K3DSparkSpeculatorConfig.of_draft(config))
    tokens = DOCUMENTS.shape[1]
    for anchors in ([0, 5, 6], [13, 3, 3], [7]):
        mask = model._create_attention_mask(
            DOCUMENTS, tokens, torch.tensor(anchors), torch.device("cpu")
        )
        assert mask.shape[-2:] == (len(anchors) * 3, tokens + len(anchors) * 3)
        sees = mask == 0 if mask.is_floating_point() else mask
        for q in range(mask.shape[-2]):
            anchor, block = anchors[q // 3], q // 3
            for kv in range(mask.shape[-1]):
                if kv < tokens:
                    same = DOCUMENTS[0, kv] == DOCUMENTS[0, anchor]
                    expected = bool(same) and kv < anchor
                else:
                    expected = (kv - tokens) // 3 == block
                assert bool(sees[0, 0, q, kv]) is expected, (anchors, q, kv)


@pytest.mark.parametrize("implementation", ["eager", "simple_flex_attention"])
def test_every_attention_implementation_gives_the_same(implementation: str) -> None:
    given = inputs(model := draft())
    anchors = len(every_anchor(model))
    with torch.no_grad():
        expected, *_ = model._backbone_forward(**given, max_anchors=anchors)
        config = draft_config()
        config._attn_implementation = implementation
        other = K3DSparkModel(K3DSparkSpeculatorConfig.of_draft(config))
        other.load_state_dict(model.state_dict())
        if implementation == "simple_flex_attention":
            from torch.nn.attention.flex_attention import create_block_mask

            other._create_mask_fn = create_block_mask  # not compiled
        states, *_ = other._backbone_forward(**given, max_anchors=anchors)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)


def test_a_block_sees_itself_whole_and_of_the_context_what_is_before_its_anchor() -> None:
    model = draft()
    given = inputs(model)
    anchors = every_anchor(model)
    anchor, at = 3, anchors.index(3)

    def block(**changes: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden, *_ = model._backbone_forward(**{**given, **changes}, max_anchors=len(anchors))
        return hidden[0].view(len(anchors), 3, -1)[at]

    before = block()
    for position in range(DOCUMENTS.shape[1]):
        taps = given["hidden_states"].clone()
        taps[0, position] += 1
        changed = not torch.equal(block(hidden_states=taps), before)
        assert changed is (position < anchor)
    ids = given["input_ids"].clone()
    ids[0, anchor] = (ids[0, anchor] + 1) % 63
    assert bool((block(input_ids=ids) != before).any(dim=-1).all())
    for position in range(DOCUMENTS.shape[1]):
        if position not in anchors:  # a token that is no anchor is never embedded
            ids = given["input_ids"].clone()
            ids[0, position] = (ids[0, position] + 1) % 63
            assert torch.equal(block(input_ids=ids), before)
