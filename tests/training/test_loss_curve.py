"""The loss of a run, in windows and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from stagetap.training.loss_curve import LossCurve

REPORTS = [
    {"train": {"loss": 4.0}, "global_step": 0},
    {"train": {"loss": 2.0}, "global_step": 1},
    {"val": {"loss_epoch": 2.5}, "epoch": 0},
    {"train": {"loss": 1.0}, "global_step": 2},
    {"val": {"loss_epoch": 1.5}, "epoch": 1},
]


def test_what_the_trainer_reports() -> None:
    curve = LossCurve.of_reports(REPORTS)
    assert curve.steps == [4.0, 2.0, 1.0]
    assert curve.epochs == [(2, 2.5), (3, 1.5)]


@pytest.mark.parametrize(
    ("count", "windows"),
    [
        (1, [(0, 3, 7 / 3)]),
        (2, [(0, 1, 4.0), (1, 3, 1.5)]),
        (10, [(0, 1, 4.0), (1, 2, 2.0), (2, 3, 1.0)]),
    ],
)
def test_windows_hold_every_step_once(count: int, windows: list[tuple[int, int, float]]) -> None:
    assert LossCurve.of_reports(REPORTS).windows(count) == windows


@pytest.mark.parametrize("reports", [REPORTS, REPORTS[:1]])
def test_a_picture(reports: list[dict[str, object]], tmp_path: Path) -> None:
    LossCurve.of_reports(reports).draw(tmp_path / "loss.png", "tiny")
    with Image.open(tmp_path / "loss.png") as picture:
        picture.verify()
        assert picture.format == "PNG"
