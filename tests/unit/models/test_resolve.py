"""Short names of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

import stagetap.models as models
from stagetap.errors import Refused


def test_a_named_checkpoint_is_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "models_folder", lambda: tmp_path)
    with pytest.raises(Refused, match=r"smollm2 is not at .*run `\./justw setup`"):
        models.resolve_model("smollm2")
    (tmp_path / "smollm2").mkdir()
    assert models.resolve_model("smollm2") == str(tmp_path / "smollm2")


@pytest.mark.parametrize("name", ["org/model", "/some/where", "./smollm2", ""])
def test_any_other_name_is_left_alone(name: str) -> None:
    assert models.resolve_model(name) == name
