"""The start-up self-check: what it takes, and everything that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.models.interfaces import EagleModelMixin

from checkpoints import tiny_checkpoint
from engine.harness import Arm
from stagetap.engine.capture.decoder import Decoder, find_decoder
from stagetap.engine.capture.probe import Probe
from stagetap.engine.capture.self_check import SelfCheck, TapPlan
from stagetap.errors import Refused
from stagetap.taps import STREAM_RESIDUAL

WIDTH, TOKENS, VOCABULARY = 8, 6, 64


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | None]]:
    """What each stage said to hooks that were changed on the second one."""
    model = tiny_checkpoint("llama", tmp_path_factory.mktemp("llama"))
    found: dict[str, list[str | None]] = Arm(
        job="engine.sabotage:on_second_stage", session=None, arguments={"model": str(model)}
    ).run()
    return found


@pytest.mark.engine
@pytest.mark.parametrize(
    ("how", "tap"), [("swap", 4), ("drop_residual", 4), ("shift_index", 6), ("remove", 5)]
)
def test_a_wrong_hook_on_a_later_stage_is_refused(
    sabotaged: dict[str, list[str | None]], how: str, tap: int
) -> None:
    first, second = sabotaged[how]
    assert first is None
    assert second is not None
    assert second.startswith(f"LlamaForCausalLM, stage 1, tap {tap}: what StageTap captures (")
    assert "is not the model's own tap (bfloat16 [16, 128])" in second


@pytest.mark.engine
def test_hooks_that_nobody_changed_are_proven(sabotaged: dict[str, list[str | None]]) -> None:
    assert sabotaged["nothing"] == [None, None]


# A small model in this process ---------------------------------------------------------------


class ToyLayer(nn.Module):
    """A decoder layer in the form that most models have."""

    def __init__(self, number: int):
        super().__init__()
        self.weight = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(number))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = hidden_states if residual is None else hidden_states + residual
        return torch.tanh(stream @ self.weight), stream


class ToyDecoder(nn.Module):
    """Runs the layers; `between` may change the stream after one, as a deepstack does."""

    def __init__(self, layers: int = 4):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(ToyLayer(number) for number in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.between: Callable[[int, torch.Tensor], torch.Tensor] = lambda _, hidden: hidden

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), None
        for number, layer in enumerate(self.layers):
            hidden, residual = layer(None, hidden, residual)
            hidden = self.between(number, hidden)
        return self.norm(hidden + residual)


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ToyDecoder()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids)


@contextmanager
def no_grad_and_context() -> Iterator[None]:
    from vllm.forward_context import ForwardContext, override_forward_context

    context = ForwardContext(no_compile_layers={}, attn_metadata=None, slot_mapping={})
    with torch.inference_mode(), override_forward_context(context):
        yield


def check_of(model: ToyModel, dtype: torch.dtype = torch.float32) -> SelfCheck:
    def forward(count: int) -> None:
        with no_grad_and_context():
            model(input_ids=torch.zeros(count, dtype=torch.int64))

    decoder = Decoder("model.layers", model.model, model.model.layers, 0, 4)
    probe = Probe(
        model,
        decoder,
        width=WIDTH,
        vocabulary=VOCABULARY,
        forward=forward,
        mixers=[],
        rows=TOKENS,
    )
    return SelfCheck(
        model,
        decoder,
        probe,
        stage=0,
        last=True,
        dtype=dtype,
        share=lambda entry: [entry],
        stream=STREAM_RESIDUAL,
    )


def described(plans: list[TapPlan]) -> list[str]:
    return [plan.describe() for plan in plans]


def test_a_model_without_tap_code_is_read_from_its_layers_outputs() -> None:
    assert described(check_of(ToyModel()).choose([0, 1, 3, 4])) == [
        "hidden_states into model.layers.0",
        "output 0 + output 1 of model.layers.0",
        "output 0 + output 1 of model.layers.2",
        "output 0 + output 1 of model.layers.3",
    ]


def test_a_stream_that_changes_between_two_layers_is_refused_without_tap_code() -> None:
    model = ToyModel()
    model.model.between = lambda number, hidden: hidden + 1 if number == 1 else hidden
    check = check_of(model)
    check.choose([1, 3])
    with pytest.raises(Refused, match=r"ToyModel, stage 0, tap 2: .* is not to be read anywhere"):
        check.choose([2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stream: torch.zeros_like(stream), "is zero (float32 [6, 8])"),
        (lambda stream: stream[:1].expand(TOKENS, WIDTH), "has equal rows for different tokens"),
        (lambda stream: stream[: TOKENS // 2], "0 tensors of the right shape"),
        (lambda stream: stream.double(), "is torch.float64, and taps are stored as torch.float32"),
    ],
)
def test_a_stream_that_proves_nothing_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], message: str
) -> None:
    model = ToyModel()

    def second(_module: nn.Module, _args: Any, output: Any) -> Any:
        hidden, residual = output
        return change(hidden + residual), change(hidden + residual) * 0

    model.model.layers[1].register_forward_hook(second)
    model.model.layers[2].forward = lambda positions, hidden_states, residual: (
        (hidden_states + residual).float().tanh(),
        hidden_states.float() + residual.float(),
    )
    with pytest.raises(Refused) as refused:
        check_of(model).choose([2])
    assert str(refused.value).startswith("ToyModel, stage 0, tap 2: ")
    assert message in str(refused.value)


class StaleLayer(ToyLayer):
    """Hands on what it was given beside the stream, and reads no such thing, as Command-R does."""

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden_states
        return residual + torch.tanh(hidden_states @ self.weight), residual


class FirstAlone(nn.Module):
    """A norm that takes a residual and leaves it as it is."""

    def forward(self, hidden: torch.Tensor, residuals: torch.Tensor) -> Any:
        return nn.functional.layer_norm(hidden, (WIDTH,)), residuals


class StaleDecoder(ToyDecoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(StaleLayer(number) for number in range(4))
        self.norm = FirstAlone()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(None, hidden, residual)
        return self.norm(hidden, residual)[0]


def test_a_residual_that_nobody_reads_is_no_part_of_the_stream() -> None:
    model = ToyModel()
    model.model = StaleDecoder()
    assert described(check_of(model).choose([0, 1, 3, 4])) == [
        "hidden_states into model.layers.0",
        "output 0 of model.layers.0",
        "output 0 of model.layers.2",
        "output 0 of model.layers.3",
    ]


@pytest.mark.parametrize(
    "read",
    [
        lambda hidden, residual: hidden + 0.5 * residual,
        lambda hidden, residual: torch.cat([hidden, residual], 1)[:, ::2],
    ],
)
def test_two_tensors_that_are_not_added_are_refused(
    read: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """As in Zamba, whose layers read the embedding beside the stream."""
    model = ToyModel()
    layer = model.model.layers[2]
    layer.forward = lambda positions, hidden_states, residual: (
        torch.tanh(read(hidden_states, residual) @ layer.weight),
        hidden_states,
    )
    check_of(model).choose([1])
    with pytest.raises(Refused, match="tap 2: 2 tensors of the right shape go hidden_states"):
        check_of(model).choose([2])


def test_numbers_that_are_not_finite_prove_nothing() -> None:
    model = ToyModel()
    model.model.layers[1].register_forward_hook(
        lambda _module, _args, output: (output[0] * float("nan"), output[1])
    )
    with pytest.raises(Refused, match=r"tap 2: .* has numbers that are not finite"):
        check_of(model).choose([2])


class ShardingDecoder(ToyDecoder, EagleModelMixin):
    """Its layer 2 hands its own tap code half of the tokens, as sequence parallelism does."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed(input_ids), None
        for number, layer in enumerate(self.layers):
            hidden, residual = layer(None, hidden, residual)
            own = TOKENS // 2 if number == 2 else TOKENS
            self._maybe_add_hidden_state([], number + 1, hidden[:own], residual[:own])
        return self.norm(hidden + residual)


def test_shards_of_a_sequence_are_refused() -> None:
    model = ToyModel()
    model.model = ShardingDecoder()
    assert described(check_of(model).choose([1, 2, 4]))[1] == (
        "hidden_states + residual into model.layers.2"
    )
    with pytest.raises(Refused) as refused:
        check_of(model).choose([2, 3])
    assert str(refused.value).startswith(
        "ToyModel, stage 0, tap 3: it has 3 rows in a step of another number of tokens; shards of "
        "a sequence"
    )


def test_layers_that_do_nothing_cannot_be_told_apart() -> None:
    model = ToyModel()
    model.model.layers[2].register_forward_hook(
        lambda _module, args, _output: (args[1] + args[2], torch.zeros_like(args[1]))
    )
    with pytest.raises(Refused, match=r"tap 3: .* equals that of tap 2"):
        check_of(model).choose([2, 3])


def test_the_decoder_is_found_by_its_number_of_layers() -> None:
    model = ToyModel()
    found = find_decoder(model, 4)
    assert (found.path, found.start, found.end) == ("model.layers", 0, 4)
    assert found.parent is model.model
    with pytest.raises(Refused, match="ToyModel has no lists of 5 decoder layers"):
        find_decoder(model, 5)
    model.draft = ToyDecoder()
    with pytest.raises(Refused, match="ToyModel has 2 lists of 4 decoder layers"):
        find_decoder(model, 4)


def test_layers_of_other_stages_are_placeholders(tmp_path: Path) -> None:
    from vllm.model_executor.models.utils import PPMissingLayer

    model = ToyModel()
    model.model.layers[0] = model.model.layers[3] = PPMissingLayer()
    found = find_decoder(model, 4)
    assert (found.start, found.end) == (1, 3)
    model.model.layers[1], model.model.layers[2] = ToyLayer(1), PPMissingLayer()
    model.model.layers[3] = ToyLayer(3)
    with pytest.raises(Refused, match=r"runs layers \[1, 3\] of model.layers, which do not follow"):
        find_decoder(model, 4)
