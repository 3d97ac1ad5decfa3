"""vLLM that does not use StageTap behaves as before, and a capture adds nothing to the wire."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.harness import Arm, clean_environment, random_prompts, refusals
from engine.unpatched import unpatched_site

pytestmark = pytest.mark.engine

PROMPTS = random_prompts([5, 40, 200], seed=11)
INSECURE = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}  # to run a function of ours in a worker


@pytest.fixture(scope="module")
def plain(checkpoint: Callable[..., str]) -> Any:
    """Patched vLLM, plugin installed, StageTap not used."""
    arguments = {"model": checkpoint("llama"), "prompts": PROMPTS, "pp": 2}
    return Arm("engine.jobs:plain_generation", None, arguments, INSECURE).run()


@pytest.fixture(scope="module")
def capturing(checkpoint: Callable[..., str], stores: Callable[[str], Path]) -> Any:
    """The same prompts in an engine that captures every tap and exports every request."""
    session = {
        "model": checkpoint("llama"),
        "layers": [0, 1, 2, 3, 4, 5, 6],
        "store": str(stores("boundary")),
        "pp": 2,
        "engine_args": {"skip_tokenizer_init": True},
    }
    arguments = {"prompts": PROMPTS, "export": True}
    return Arm("engine.jobs:generate", session, arguments, INSECURE).run()


def test_what_crosses_a_boundary_is_the_same_with_and_without_capture(
    plain: Any, capturing: Any
) -> None:
    without, with_capture = plain["boundary"], capturing["boundary"]
    assert len(without) == 2
    assert [set(step) for step in without[0]] == [{"hidden_states", "residual"}] * len(without[0])
    assert without[0], "nothing was recorded"
    assert with_capture == without
    assert with_capture[1] == [], "the last stage sends nothing"


def test_a_stage_holds_memory_for_its_own_taps_alone(capturing: Any) -> None:
    """Ids 0 to 3 on the first stage, 4 to 6 on the second, 128 numbers each."""
    assert capturing["pages"] == [[1, 4, 128], [1, 3, 128]]


def test_a_capture_changes_no_token(plain: Any, capturing: Any) -> None:
    assert capturing["tokens"] == plain["tokens"]


def test_patched_and_unpatched_generate_the_same(
    plain: Any, checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    site = unpatched_site(tmp_path, shim=True)
    arguments = {"model": checkpoint("llama"), "prompts": PROMPTS, "pp": 2}
    # The shim looks when Python starts.
    environment = {**INSECURE, "PYTHONPATH": str(site), "TRITON_INTERPRET": "1"}
    released = Arm("engine.jobs:plain_generation", None, arguments, environment).run()
    assert released["package"].startswith(str(site))
    assert not plain["package"].startswith(str(site))
    assert released["tokens"] == plain["tokens"]
    assert released["logprobs"] == plain["logprobs"]
    assert released["boundary"] == plain["boundary"]


USES_PLUGIN_AND_INSPECTS = """
import vllm
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert "StageTapConnector" in KVConnectorFactory._registry
from vllm import EngineArgs
config = EngineArgs(model={model!r}, enforce_eager=True).create_engine_config()
print("architecture", config.model_config.architecture, vllm.__path__[0])
"""


def test_an_unpatched_vllm_inspects_models_with_the_plugin_installed(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    site = unpatched_site(tmp_path, shim=False)
    code = USES_PLUGIN_AND_INSPECTS.format(model=checkpoint("llama"))
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(PYTHONPATH=str(site)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert f"architecture LlamaForCausalLM {site}" in child.stdout


SERVE_HELP = """
import sys
sys.argv = ["vllm", "serve", "--help=all"]
{before}
from vllm.entrypoints.cli.main import main
main()
"""
# What the patch "cli: take the version from the package" cures on CPU builds.
KNOWN_VERSION = """
import importlib.metadata as m
ask = m.version
m.version = lambda name: "0.32.0+cpu" if name == "vllm" else ask(name)
"""


@pytest.mark.parametrize("patched", [True, False])
def test_serve_help(patched: bool, tmp_path: Path) -> None:
    path = {} if patched else {"PYTHONPATH": str(unpatched_site(tmp_path, shim=False))}
    code = SERVE_HELP.format(before="" if patched else KNOWN_VERSION)
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(**path),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    assert "--pipeline-parallel-size" in child.stdout
    for flag in ("--stagetap-layers", "--stagetap-store"):
        assert (flag in child.stdout) == patched


CONNECTOR_WITHOUT_PATCHES = """
from stagetap.engine.flags import kv_transfer_config
from vllm import LLM
LLM({model!r}, enforce_eager=True, skip_tokenizer_init=True,
    kv_transfer_config=kv_transfer_config([0, 6], {store!r}))
"""


def test_an_unpatched_vllm_is_refused_as_soon_as_stagetap_is_used(
    checkpoint: Callable[..., str], tmp_path: Path
) -> None:
    site = unpatched_site(tmp_path / "site", shim=True)
    store = tmp_path / "store"
    code = CONNECTOR_WITHOUT_PATCHES.format(model=checkpoint("llama"), store=str(store))
    child = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(
            PYTHONPATH=str(site), VLLM_USE_V2_MODEL_RUNNER="1", TRITON_INTERPRET="1"
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode != 0
    (line,) = refusals(child.stderr)
    assert line.startswith("the patch series is not applied to")
    assert "stagetap patch apply" in line
    assert not store.exists()
