"""Loads a draft's checkpoint with vLLM's own classes and holds it against the trainer's model.

``python -m drafts.in_vllm DRAFT TARGET`` prints one line of JSON. A process of its own, since vLLM
sets up its process groups once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from stagetap.engine.environment import engine_environment

os.environ.update(engine_environment(1, 1))

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import (
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.engine.arg_utils import EngineArgs

from stagetap.drafts.k3_dspark import K3DSparkModel


def main(draft: Path, target: Path) -> dict[str, Any]:
    config = EngineArgs(
        model=str(target),
        speculative_config={"model": str(draft), "method": "dspark"},
        enforce_eager=True,
        max_model_len=256,
    ).create_engine_config()
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        from vllm.models.kimi_k3.nvidia.dspark_mla import K3DSparkForCausalLM
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
            get_eagle3_aux_layers_from_config,
        )

        torch.set_default_dtype(torch.bfloat16)
        theirs = K3DSparkForCausalLM(vllm_config=config)
        tensors = load_file(draft / "model.safetensors")
        loaded = theirs.load_weights(iter(tensors.items()))
        for module in theirs.modules():
            # Its CPU build sets this after loading, and packs the weights that we look at away.
            module.cpu_linear = torch.nn.functional.linear
        torch.set_default_dtype(torch.float32)
        ours = K3DSparkModel.from_pretrained(draft, verifier=str(target), dtype=torch.bfloat16)
        return {
            "not loaded": sorted({name for name, _ in theirs.named_parameters()} - loaded),
            "taps": list(get_eagle3_aux_layers_from_config(config.speculative_config)),
            "block": config.speculative_config.num_speculative_tokens,
            **compare(theirs, ours),
        }


@torch.no_grad()
def compare(theirs: Any, ours: K3DSparkModel) -> dict[str, Any]:
    """What both can compute here: all but attention, whose kernels need a GPU."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    taps, states = numbers(5, ours.context_proj.in_features), numbers(5, ours.hidden_size)
    tokens = torch.tensor([0, 3, 9, 11, 60])
    differences = {}

    def differ(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
        differences[name] = (a.float() - b.float()).abs().max().item()

    differ(
        "context", theirs.combine_hidden_states(taps), ours.context_norm(ours.combine_taps(taps))
    )
    embeddings = ours.markov_head.prev_embeddings(tokens)
    differ("markov embedding", theirs.markov_embed(tokens), embeddings)
    differ(
        "markov bias", theirs.model.markov_head.markov_w2.weight, ours.markov_head.markov_w2.weight
    )
    differ(
        "confidence",
        theirs.compute_confidence(states, embeddings),
        ours.confidence_head.float()(torch.cat((states, embeddings), -1).float()).sigmoid(),
    )
    positions = torch.tensor([[0, 1, 77, 4000, 100_000]])
    for i, (their_layer, layer) in enumerate(zip(theirs.model.layers, ours.layers, strict=True)):
        cos, sin = ours.rotary_emb(taps, positions)
        differ(
            f"angles {i}",
            their_layer.self_attn.rotary_emb.cos_sin_cache[positions[0]],
            torch.cat((cos[0], sin[0]), -1),
        )
        differences[f"scale {i}"] = abs(their_layer.self_attn.scale - layer.self_attn.scaling)
        latent = their_layer.self_attn.fused_qkv_a_proj(states)[0]
        attention = layer.self_attn
        ranks = [attention.q_a_proj.out_features, attention.kv_a_proj_with_mqa.out_features]
        q, kv = latent.split(ranks, dim=-1)
        differ(f"queries' latent {i}", q, attention.q_a_proj(states))
        differ(f"keys' latent {i}", kv, attention.kv_a_proj_with_mqa(states))
        for name in ("q_b_proj", "kv_b_proj", "o_proj"):
            differ(
                f"{name} {i}",
                getattr(their_layer.self_attn, name).weight,
                getattr(attention, name).weight,
            )
        differ(f"mlp {i}", their_layer.mlp(states), layer.mlp(states))
    # One projection fills the context's cache for all layers.
    context = theirs.model.context_kv_proj(states)
    each = [layer.self_attn.kv_a_proj_with_mqa(states) for layer in ours.layers]
    differ("context's latents", context, torch.cat(each, -1))
    return {"differences": differences}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
