"""Where the plugin is installed and nothing else: a wrong path is named, otherwise a package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from unit.plan.targets import ROOT
from unit.recipe.recipes import filled, written

PROMPT = '{"prompt_token_ids": [1, 2]}\n'
NO_FOLDER = "model nosuch: no such folder"


Bare = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What plain ``pip install stagetap`` leaves in site-packages."""
    folder = tmp_path_factory.mktemp("site-packages")
    wanted, seen = ["stagetap"], set()
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        found = distribution(name)
        for top in {file.parts[0] for file in found.files or () if file.parts[0] != ".."}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))
        for each in map(Requirement, found.requires or ()):
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                wanted.append(each.name)
    return folder


@pytest.fixture
def bare(installed: Path, tmp_path: Path) -> Bare:
    """``stagetap`` with these packages alone: exit code, stdout, stderr."""
    path = os.pathsep.join([str(installed), str(ROOT / "plugin")])

    def run(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, "-S", "-m", "stagetap", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200", "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("plan nosuch --layers 2", NO_FOLDER),
        ("plan org/nosuch --layers 2", "huggingface_hub, which finds what was downloaded, is not"),
        ("plan novel --layers 2", "the default of model type 'novel' is not known here"),
        ("capture --model nosuch --layers 2 --prompts p.jsonl --out out", NO_FOLDER),
        ("serve nosuch --layers 2 --store out --dry-run", NO_FOLDER),
        ("equivalence --model nosuch --layers 2", NO_FOLDER),
        ("equivalence --model novel --layers 2", "torch is not installed, and this command needs"),
        ("demo", "torch is not installed, and this command needs it: install vLLM"),
        ("rows nosuch --out rows", "nosuch is no StageTap store"),
    ],
)
def test_one_line(bare: Bare, tmp_path: Path, command: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(PROMPT)
    (tmp_path / "novel").mkdir()
    (tmp_path / "novel" / "config.json").write_text(
        '{"model_type": "novel", "num_hidden_layers": 6, "hidden_size": 8, "vocab_size": 9,'
        ' "num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 999}'
    )
    code, _, stderr = bare(*command.split())
    assert code in (1, 2)
    assert stderr.startswith("stagetap: ")
    assert said in stderr
    assert stderr.count("\n") == 1


def test_a_checked_type_is_planned(bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "gemma3_text", "num_hidden_layers": 6, "hidden_size": 256,'
        ' "intermediate_size": 512}'
    )
    code, stdout, stderr = bare("plan", ".", "--layers", "2")
    assert (code, stderr) == (0, "")
    assert "vocab_size 262208, num_attention_heads 8" in stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nosuch"], NO_FOLDER),
        (["--config", "nosuch.yaml"], "nosuch.yaml is no file"),
        (["--config", "serve.yaml"], "vllm is not installed"),
    ],
)
def test_the_doctor_keeps_its_table(
    bare: Bare, tmp_path: Path, arguments: list[str], said: str
) -> None:
    (tmp_path / "serve.yaml").write_text("model: nosuch\n")
    code, stdout, stderr = bare("doctor", *arguments)
    assert code == 1
    assert said in stdout
    assert "python" in stdout
    assert "Traceback" not in stderr


def test_a_recipe_is_checked_without_speculators(bare: Bare, tmp_path: Path) -> None:
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)
    recipe = written(tmp_path, filled())
    code, stdout, stderr = bare("doctor", "--static", "--json", "--config", str(recipe))
    assert code == 1, stderr  # vLLM is missing as well
    found = {each["check"]: each for each in json.loads(stdout)["checks"]}
    assert found["draft and target"]["ok"]
    assert found["draft and trainer"]["found"] == "not told: speculators is not installed here"
    assert len(json.loads(stdout)["starts"]) == 14
