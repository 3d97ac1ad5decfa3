"""The start-up self-check: what it takes, and everything that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.models.interfaces import EagleModelMixin

from checkpoints import tiny_checkpoint
from engine.harness import Arm
from engine.toys import TOKENS, WIDTH, ToyDecoder, ToyLayer, ToyModel, check_of, described
from stagetap.engine.capture.decoder import find_decoder
from stagetap.errors import Refused


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


def test_a_model_without_tap_code_is_tapped_where_its_stream_is_read() -> None:
    assert described(check_of(ToyModel()).choose([0, 1, 3, 4])) == [
        "hidden_states into model.layers.0",
        "hidden_states + residual into model.layers.1",
        "hidden_states + residual into model.layers.3",
        "input into norm",
    ]


def test_a_stream_that_changes_between_two_layers_is_refused_without_tap_code() -> None:
    model = ToyModel()
    model.model.between = lambda number, hidden: hidden + 1 if number == 1 else hidden
    check = check_of(model)
    check.choose([1, 3])
    with pytest.raises(Refused, match=r"tap 2: .* the model changes the stream between them"):
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
        "hidden_states into model.layers.1",
        "hidden_states into model.layers.3",
        "hidden into norm",
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
