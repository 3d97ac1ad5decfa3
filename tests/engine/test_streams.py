"""Which stream a loaded model's taps are of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from stagetap.engine.capture.attention_residuals import MIX, stream_of
from stagetap.errors import Refused
from stagetap.taps import MIXTURE_ENV, STREAM_MIXTURE, STREAM_PREFIX_SUM, STREAM_RESIDUAL


class Decoder(nn.Module):
    """A decoder as far as it is looked at."""

    def __init__(self, block_size: int | None) -> None:
        super().__init__()
        self.config = SimpleNamespace(attn_res_block_size=block_size)


class MixingDecoder(Decoder):
    def _capture_aux_hidden_stream(self) -> None: ...


@pytest.mark.parametrize(
    ("decoder", "mixture", "stream"),
    [
        (nn.Linear(1, 1), "1", STREAM_RESIDUAL),
        (MixingDecoder(None), "1", STREAM_RESIDUAL),  # Kimi-Linear, in the same class
        (MixingDecoder(3), "0", STREAM_PREFIX_SUM),
        (MixingDecoder(3), "1", STREAM_MIXTURE),
        (Decoder(3), "0", STREAM_PREFIX_SUM),
    ],
)
def test_the_stream_is_the_models_and_the_environments(
    monkeypatch: pytest.MonkeyPatch, decoder: nn.Module, mixture: str, stream: str
) -> None:
    monkeypatch.setenv(MIXTURE_ENV, mixture)
    assert stream_of(decoder) == stream


def test_a_decoder_without_code_for_the_mixture_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the one for ROCm."""
    monkeypatch.setenv(MIXTURE_ENV, "1")
    with pytest.raises(Refused, match=f"cannot compute the mixture.*unset {MIXTURE_ENV}"):
        stream_of(Decoder(3))


def test_the_code_is_vllms() -> None:
    from vllm.models.kimi_k3.nvidia.model import KimiLinearModel

    assert callable(getattr(KimiLinearModel, MIX))
