"""Names, shapes, files and training of a K3 draft."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafts.tiny_k3 import PUBLISHED, TINY, draft, draft_config, write_target
from stagetap.drafts.k3_dspark import K3DSparkConfig, K3DSparkModel, K3DSparkSpeculatorConfig
from stagetap.layer_choice import spread

RECIPE_DRAFT = Path(__file__).parents[2] / "configs/drafts/kimi_k3_dspark_mla.json"

LAYER = {
    "input_layernorm": (7168,),
    "post_attention_layernorm": (7168,),
    "self_attn.q_a_proj": (1536, 7168),
    "self_attn.q_a_layernorm": (1536,),
    "self_attn.q_b_proj": (12288, 1536),
    "self_attn.kv_a_proj_with_mqa": (576, 7168),
    "self_attn.kv_a_layernorm": (512,),
    "self_attn.kv_b_proj": (16384, 512),
    "self_attn.o_proj": (7168, 8192),
    "mlp.gate_proj": (14336, 7168),
    "mlp.up_proj": (14336, 7168),
    "mlp.down_proj": (7168, 14336),
}
TENSORS = {
    "embed_tokens.weight": (163840, 7168),
    "context_proj.weight": (7168, 35840),
    "context_norm.weight": (7168,),
    "final_norm.weight": (7168,),
    "markov_head.markov_w1.weight": (163840, 256),
    "markov_head.markov_w2.weight": (163840, 256),
    "confidence_head.proj.weight": (1, 7424),
    "confidence_head.proj.bias": (1,),
    **{f"layers.{i}.{name}.weight": shape for i in range(5) for name, shape in LAYER.items()},
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def stored(model: K3DSparkModel) -> dict[str, torch.Tensor]:
    return {name: t for name, t in model.state_dict().items() if name in model.stored_names()}


def test_the_published_tensors() -> None:
    with torch.device("meta"):
        config = K3DSparkConfig(**PUBLISHED)
        config._attn_implementation = "sdpa"
        model = K3DSparkModel(K3DSparkSpeculatorConfig.of_draft(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored(model).items()}
    assert shapes == TENSORS
    assert len(shapes) == 68
    sizes = {name: tensor.numel() for name, tensor in stored(model).items()}
    assert sum(sizes.values()) == 3_562_312_961
    assert sum(sizes.values()) - sizes["embed_tokens.weight"] == 2_387_907_841


def test_the_recipes_draft_is_the_published_one_with_a_norm_for_each_tap(tmp_path: Path) -> None:
    document = json.loads(RECIPE_DRAFT.read_text("utf-8"))
    assert {name: document[name] for name in PUBLISHED if name != "target_layer_ids"} == {
        name: value for name, value in PUBLISHED.items() if name != "target_layer_ids"
    }
    config = K3DSparkConfig.from_pretrained(RECIPE_DRAFT)
    # Where `dspark:5` of 93 layers taps, each one less: a draft counts layers from 0.
    assert config.tap_ids == list(spread(93, 5)) == [2, 24, 47, 69, 91]
    assert config.stream == "attn_res_mixture"
    with torch.device("meta"):
        config._attn_implementation = "sdpa"
        model = K3DSparkModel(K3DSparkSpeculatorConfig.of_draft(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in stored(model).items()}
    assert shapes == TENSORS | {f"fc_norm.{tap}.weight": (7168,) for tap in range(5)}
    assert sum(tensor.numel() for tensor in stored(model).values()) == 3_562_312_961 + 5 * 7168
    for source in (RECIPE_DRAFT, tmp_path):
        K3DSparkConfig.from_pretrained(source).save_pretrained(tmp_path)
        written = json.loads((tmp_path / "config.json").read_text("utf-8"))
        assert {name: written[name] for name in document} == document


def test_the_page_on_kimi_k3_builds_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = RECIPE_DRAFT.parents[2]
    [example] = re.findall(
        "```python\n(import torch.*?)```", (root / "docs/kimi_k3.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(root)
    exec(example, {})
    printed = re.findall(r"print\(.*\)  # (.*)", example)
    assert capsys.readouterr().out.splitlines() == printed


def test_a_draft_is_not_made_of_its_config_json_alone() -> None:
    with pytest.raises(TypeError, match=r"not of a K3DSparkConfig: give .*of_draft\(\.\.\.\)"):
        K3DSparkModel(draft_config())


def test_a_norm_for_each_tap_is_all_that_fc_norm_adds() -> None:
    plain, normed = set(stored(draft())), set(stored(draft(fc_norm=True)))
    assert plain < normed
    assert normed - plain == {"fc_norm.0.weight", "fc_norm.1.weight"}


def test_a_checkpoint_comes_back_bit_for_bit(target: Path, tmp_path: Path) -> None:
    model = draft(fc_norm=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(stored(model))
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["model_type"] == "k3_dspark"
    assert document["architectures"] == ["K3DSparkModel"]
    assert document["dtype"] == "float32"
    assert {name: document[name] for name in TINY} == TINY
    assert not [key for key in document if "speculators" in key]

    again = K3DSparkModel.from_pretrained(tmp_path, verifier=str(target))
    of_target = load_file(target / "model.safetensors")
    for name, tensor in stored(model).items():
        expected = tensor
        if name == "embed_tokens.weight":  # frozen: always the target's own
            expected = of_target["model.embed_tokens.weight"].float()
        assert torch.equal(again.state_dict()[name], expected), name
    head = of_target["lm_head.weight"].float()
    assert torch.equal(again.lm_head.weight, head)
    assert torch.equal(again.verifier_lm_head.weight, head)
    assert torch.equal(again.verifier_norm.weight, of_target["model.norm.weight"].float())
    frozen = {name for name, p in again.named_parameters() if not p.requires_grad}
    assert frozen == {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }


def test_a_checkpoint_does_not_say_its_target(tmp_path: Path) -> None:
    draft().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="say verifier=FOLDER"):
        K3DSparkModel.from_pretrained(tmp_path)


def training_arguments(target: Path, **changes: Any) -> dict[str, Any]:
    """What speculators' command line hands to a draft class, as far as it matters."""
    return {
        "verifier_name_or_path": str(target),
        "draft_attn_impl": "sdpa",
        "draft_vocab_size": 64,
        "target_layer_ids": None,
        "block_size": 8,  # its default, which the draft's own file overrides
        "mask_token_id": 5,
        **changes,
    }


def test_speculators_command_line_builds_it(target: Path, tmp_path: Path) -> None:
    """Through its own functions: from a file of shapes, from a folder without and with weights."""
    from argparse import Namespace

    from speculators.train.cli import build_draft_model

    from_file = {"draft_config": str(tmp_path / "draft.json"), "from_pretrained": ""}
    shapes = {**TINY, "model_type": "k3_dspark"}
    (tmp_path / "draft.json").write_text(json.dumps(shapes))
    common = {"speculator_type": "k3_dspark", "trust_remote_code": False}
    args = Namespace(**training_arguments(target), **from_file, **common)
    model = build_draft_model(args, K3DSparkModel, None, None, 64)
    assert type(model) is K3DSparkModel
    assert model.target_layer_ids == [3, 1]
    assert (model.block_size, model.mask_token_id) == (3, 63)
    assert model.config.speculators_config.verifier.name_or_path == str(target)
    assert not any(tensor.isnan().any() for tensor in model.state_dict().values())

    model.save_pretrained(tmp_path / "trained")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((tmp_path / "trained/config.json").read_text())
    for folder in (bare, tmp_path / "trained"):
        args = Namespace(
            **training_arguments(target), draft_config="", from_pretrained=str(folder), **common
        )
        again = build_draft_model(args, K3DSparkModel, None, None, 64)
        assert again.target_layer_ids == [3, 1]
        assert torch.equal(again.verifier_lm_head.weight, model.verifier_lm_head.weight)
        assert torch.equal(again.context_proj.weight, model.context_proj.weight) is (folder != bare)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target_layer_ids": [2, 0]}, r"says taps \[2, 0\].* says \[3, 1\]"),
        ({"draft_vocab_size": 32}, "no vocabulary of its own"),
    ],
)
def test_arguments_that_contradict_the_draft(
    target: Path, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        K3DSparkModel.from_training_args(draft_config(), **training_arguments(target, **changes))


def test_a_draft_without_a_file_is_refused(target: Path) -> None:
    from transformers import Qwen3Config

    with pytest.raises(ValueError, match="give --draft-config FILE"):
        K3DSparkModel.from_training_args(Qwen3Config(), **training_arguments(target))


def batch_of_samples(model: K3DSparkModel, samples: int, length: int) -> dict[str, torch.Tensor]:
    """Random taps and tokens, in which the target is certain of each next token.

    The first tokens of a sample are prompt, so that no block asks for the next sample's tokens.
    """
    torch.manual_seed(3)
    tokens = samples * length
    ids = torch.randint(0, 63, (1, tokens))
    position = torch.arange(tokens)[None] % length
    return {
        "hidden_states": torch.randn(1, tokens, model.context_proj.in_features),
        "input_ids": ids,
        "loss_mask": (position >= model.block_size - 1).long(),
        # The head's own row of a token, far enough out that softmax gives it nearly everything.
        "verifier_last_hidden_states": model.verifier_lm_head.weight[ids.roll(-1)].detach(),
        "document_ids": torch.arange(tokens)[None] // length,
        "position_ids": position,
    }


def test_it_learns_a_batch_of_32_samples_by_heart() -> None:
    """Over 95 % of all blocks are right from their first token to their last."""
    model = draft(hidden_size=32, q_lora_rank=16, kv_lora_rank=16, intermediate_size=64)
    with torch.no_grad():
        model.verifier_lm_head.weight.mul_(6)
        model.lm_head.weight.copy_(model.verifier_lm_head.weight)
        model.verifier_norm.weight.fill_(1)
    batch = batch_of_samples(model, samples=32, length=6)
    blocks = int(batch["loss_mask"][:, :-3].sum())
    keywords, _ = model.get_trainer_kwargs(
        loss_fn='{"ce": 0.1, "tv": 0.9}', loss_implementation="eager", max_anchors=blocks
    )
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    losses, spoiled = [], blocks
    while len(losses) < 300 and spoiled >= 0.05 * blocks:
        _, loss, metrics = model(**batch, **keywords)
        losses.append(loss.item())
        # A wrong token spoils one block at most.
        spoiled = int(metrics["full_acc_total"] - metrics["full_acc_sum"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert all(p.grad is not None for p in trainable)
    assert spoiled < 0.05 * blocks, (losses[0], losses[-1])
    assert losses[-1] < losses[0] / 4


def test_a_checkpoint_with_a_tensor_too_many_is_no_silent_success(
    target: Path, tmp_path: Path
) -> None:
    """A draft with norms of taps, read as one without, would compute something else."""
    model = draft(fc_norm=True)
    model.save_pretrained(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**document, "fc_norm": False}))
    with pytest.raises(ValueError, match=r"fc_norm"):
        K3DSparkModel.from_pretrained(tmp_path, verifier=str(target))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["context_norm.weight"], tensors["fc_norm.0.weight"], tensors["fc_norm.1.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="context_norm"):
        K3DSparkModel.from_pretrained(tmp_path, verifier=str(target))
