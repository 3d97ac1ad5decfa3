"""Made-up weights are larger while a stage is checked, and the very same afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stagetap.engine.capture.dummy import felt_layers

pytestmark = pytest.mark.engine


class GemmaRMSNorm(nn.Module):
    """Named as vLLM's norms are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        # Between -0.001 and 0.001, as vLLM makes them up, its smallest ones included.
        numbers = torch.cat((torch.linspace(-1e-3, 1e-3, 999), torch.tensor([6e-8, 0.0])))
        self.weight = nn.Parameter(numbers.to(dtype))


def model_of(dtype: torch.dtype) -> nn.Module:
    norm = GemmaRMSNorm(dtype)
    return nn.ModuleList([norm, nn.Linear(4, 4, bias=False, dtype=dtype), nn.ModuleList([norm])])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_norms_come_back_to_the_bit_however_it_ends(dtype: torch.dtype) -> None:
    model = model_of(dtype)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def check_and_end() -> None:
        larger = model.state_dict()
        assert larger["0.weight"].abs().max() == before["0.weight"].abs().max() * 2**16
        assert torch.equal(larger["1.weight"], before["1.weight"])
        raise ArithmeticError

    with pytest.raises(ArithmeticError), felt_layers(model, "dummy"):
        check_and_end()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_weights_of_a_checkpoint_stay_as_they_are() -> None:
    model = model_of(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with felt_layers(model, "auto"):
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
