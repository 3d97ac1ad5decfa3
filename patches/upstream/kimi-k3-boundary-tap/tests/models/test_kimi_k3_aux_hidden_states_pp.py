# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Aux hidden states of Kimi-K3 over pipeline stages are those of one stage.

The real decoder and layer forward run, with stubs for attention and MLP, stage
after stage in one process, with the relay between them.
"""

from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vllm.distributed.parallel_state as parallel_state
import vllm.models.kimi_k3.nvidia.model as kimi_k3
from vllm.sequence import IntermediateTensors
from vllm.utils.math_utils import cdiv
from vllm.v1.worker.gpu.pp_utils import PPHandler
from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    aux_hidden_state_relay_keys,
    reserve_aux_intermediate_tensor_slots,
)

HIDDEN, LAYERS, TOKENS = 32, 8, 5
TAPS = tuple(range(LAYERS + 1))
CUTS = [cut for n in (1, 2, 3) for cut in combinations(range(1, LAYERS), n)]

torch.set_num_threads(1)  # tensors too small for threads to help


def weight(seed: int, *shape: int, std: float = 1.0) -> nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(*shape, generator=generator) * std).bfloat16()
    return nn.Parameter(values, requires_grad=False)


class Norm(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        self.weight = weight(seed, HIDDEN)
        self.variance_epsilon = 1e-5


class Projection(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        self.weight = weight(seed, 1, HIDDEN, std=0.3)


class Mixer(nn.Module):
    """Stands for attention and for MLP."""

    def __init__(self, seed: int):
        super().__init__()
        self.weight = weight(seed, HIDDEN, HIDDEN, std=0.2)

    def forward(self, hidden_states, positions=None):
        return hidden_states @ self.weight


class Layer(kimi_k3.KimiDecoderLayer):
    def __init__(self, index: int, block_size: int):
        nn.Module.__init__(self)
        self.use_attn_res = True
        self.use_sequence_parallel = False
        self.is_block_write_layer = index % block_size == 0
        self.block_write_idx = index // block_size
        self.prev_valid_blocks = cdiv(index, block_size)
        seed = 100 * index
        self.input_layernorm = Norm(seed)
        self.post_attention_layernorm = Norm(seed + 1)
        self.self_attention_res_norm = Norm(seed + 2)
        self.mlp_res_norm = Norm(seed + 3)
        self.self_attention_res_proj = Projection(seed + 4)
        self.mlp_res_proj = Projection(seed + 5)
        self.self_attn = Mixer(seed + 6)
        self.mlp = Mixer(seed + 7)


class Decoder(kimi_k3.KimiLinearModel):
    def __init__(self, block_size: int, start: int, end: int):
        nn.Module.__init__(self)
        self.config = SimpleNamespace(hidden_size=HIDDEN)
        self.use_attn_res = True
        self.use_sequence_parallel = False
        self.attn_res_block_size = block_size
        self.start_layer, self.end_layer = start, end
        self.num_attn_res_blocks = cdiv(end, block_size)
        self.layers = nn.ModuleList(
            Layer(i, block_size) if start <= i < end else nn.Identity()
            for i in range(LAYERS)
        )
        self.embed_tokens = nn.Embedding.from_pretrained(weight(9001, 16, HIDDEN))
        self.output_attn_res_norm = Norm(9002)
        self.output_attn_res_proj = Projection(9003)


def attn_res(
    prefix,
    delta,
    blocks,
    norm_weight,
    qk_weight,
    output_norm_weight,
    num_blocks,
    block_write_idx,
    eps,
    output_norm_eps,
):
    """What the kernel computes, which runs on CPU through the interpreter alone."""
    if delta is not None:
        prefix += delta
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    sources = torch.cat([blocks[:, :num_blocks], prefix[:, None]], 1).float()
    inverse_rms = torch.rsqrt(sources.pow(2).mean(-1) + eps)
    scores = (sources * norm_weight.float() * qk_weight.float()).sum(-1) * inverse_rms
    mixed = (scores.softmax(-1)[..., None] * sources).sum(1)
    if output_norm_weight is not None:
        mixed *= torch.rsqrt(mixed.pow(2).mean(-1, keepdim=True) + output_norm_eps)
        mixed *= output_norm_weight.float()
    return mixed.to(prefix.dtype)


@pytest.fixture
def stages(monkeypatch):
    """Runs a decoder over stages; an empty cut is one stage."""
    group = SimpleNamespace()
    monkeypatch.setattr(kimi_k3, "attn_res", attn_res)
    monkeypatch.setattr(kimi_k3, "get_pp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)

    def run(block_size, cut, taps):
        bounds = (0, *cut, LAYERS)
        received = None
        for rank, (start, end) in enumerate(zip(bounds, bounds[1:])):
            group.rank_in_group, group.world_size = rank, len(cut) + 1
            group.is_first_rank, group.is_last_rank = rank == 0, rank == len(cut)
            decoder = Decoder(block_size, start, end)
            model = SimpleNamespace(
                model=decoder,
                make_empty_intermediate_tensors=decoder.make_empty_intermediate_tensors,
            )
            decoder._set_aux_hidden_state_layers(taps)
            reserve_aux_intermediate_tensor_slots(model)
            if received is not None:
                slots = model.make_empty_intermediate_tensors(
                    TOKENS, torch.bfloat16, torch.device("cpu")
                )
                shapes = {k: v.shape for k, v in received.tensors.items()}
                assert {k: v.shape for k, v in slots.tensors.items()} == shapes
            output = decoder(torch.arange(TOKENS), torch.arange(TOKENS), received)
            if not group.is_last_rank:
                handler = SimpleNamespace(
                    aux_hidden_state_relay_keys=aux_hidden_state_relay_keys(model)
                )
                relayed = PPHandler.relay_aux_hidden_states(handler, received, output)
                received = IntermediateTensors(
                    {k: v.clone() for k, v in relayed.tensors.items()}
                )
        return output if taps else (output, [])

    return run


@pytest.mark.parametrize("block_size", [2, 3, 4])
@pytest.mark.parametrize("mixture", [False, True])
def test_every_cut_gives_the_states_of_one_stage(
    monkeypatch, stages, block_size, mixture
):
    monkeypatch.setenv("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM", str(int(mixture)))
    hidden, one_stage = stages(block_size, (), TAPS)
    assert len(one_stage) == len(TAPS)
    for cut in CUTS:
        cut_hidden, states = stages(block_size, cut, TAPS)
        assert torch.equal(cut_hidden, hidden), cut
        wrong = [k for k in TAPS if not torch.equal(states[k], one_stage[k])]
        assert len(states) == len(TAPS) and not wrong, (cut, wrong)
    # The boundaries alone, and everything else: slots are relayed in order.
    for cut in CUTS:
        for taps in (cut, tuple(k for k in TAPS if k not in cut)):
            _, states = stages(block_size, cut, taps)
            assert len(states) == len(taps)
            for state, tap in zip(states, taps):
                assert torch.equal(state, one_stage[tap]), (cut, tap)


def test_the_streams_differ(monkeypatch, stages):
    streams = []
    for mixture in ("0", "1"):
        monkeypatch.setenv("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM", mixture)
        streams.append(stages(3, (), TAPS)[1])
    same = [k for k, (a, b) in enumerate(zip(*streams)) if torch.equal(a, b)]
    assert same == [0]
