"""The smaller commands, and what all commands share."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from stagetap.cli.demo import LAYERS, PROMPTS, remove_earlier_demo
from stagetap.cli.disk import SAMPLE_OVERHEAD_BYTES, DiskGuard
from stagetap.cli.model_facts import ModelFacts, model_facts
from stagetap.cli.output import human_bytes, print_json
from stagetap.errors import Refused
from stagetap.partition import owners, stage_layers
from stagetap.prompts import read_prompt_file
from unit.cli.commands import Command

# Shared -------------------------------------------------------------------------------------


def test_help_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = ['stagetap', '--help']\n"
        "try: runpy.run_module('stagetap', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print('heavy:', *sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"
    for name in ("capture", "inspect", "verify", "equivalence", "serve", "plan", "doctor", "demo"):
        assert name in done.stdout


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stagetap", "inspect", tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.startswith("stagetap: error: ")
    assert done.stderr.count("\n") == 1


def test_version(stagetap: Command) -> None:
    done = stagetap("--version")
    assert (done.code, done.stdout) == (0, f"stagetap {version('stagetap')}\n")


def test_a_wrong_option_is_exit_code_2(stagetap: Command) -> None:
    done = stagetap("inspect", "--nothing")
    assert (done.code, done.stdout) == (2, "")
    assert stagetap("capture", "--pp", "0").code == 2


def test_debug_shows_the_traceback(
    stagetap: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STAGETAP_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["stagetap", "inspect", str(tmp_path)])
    from stagetap.cli import main
    from stagetap.errors import ForeignStore

    with pytest.raises(ForeignStore):
        main()


def test_json_has_no_numbers_that_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": float("inf"), "b": [float("nan"), 1.5], 3: (True, None)})
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [None, 1.5], "3": [True, None]}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**60, "1048576.0 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


# What a checkpoint says ---------------------------------------------------------------------


def test_model_facts(checkpoint: Path) -> None:
    facts = model_facts(str(checkpoint))
    assert facts == ModelFacts(6, 16, 500, 64, "bfloat16")
    assert facts.row_bytes(4, None) == 4 * 16 * 2 + 8
    assert facts.row_bytes(4, "auto") == 4 * 16 * 2 + 8
    assert facts.row_bytes(4, "float32") == 4 * 16 * 4 + 8
    assert facts.row_bytes(4, "float") == facts.row_bytes(4, "float32")
    assert facts.row_bytes(4, "half") == facts.row_bytes(4, "float16") == 4 * 16 * 2 + 8
    for unknown in ("double", "float64", 16, ""):
        with pytest.raises(Refused, match="is none that vLLM knows; use auto or one of bfloat16"):
            facts.row_bytes(4, unknown)  # type: ignore[arg-type]
    assert ModelFacts().row_bytes(4, "float32") is None


def test_model_facts_of_a_nested_configuration(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 4, "hidden_size": 8, "vocab_size": 9, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text, "hidden_size": 99}))
    assert model_facts(str(tmp_path)) == ModelFacts(4, 8, 9, None, "float32")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ],
)
def test_scaled_positions_leave_the_length_to_vllm(checkpoint: Path, scaling: object) -> None:
    config = checkpoint / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **scaling}))  # type: ignore[dict-item]
    assert model_facts(str(checkpoint)).max_len is None
    plain = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "rope_scaling": None}
    config.write_text(json.dumps({"max_position_embeddings": 32, **plain}))
    assert model_facts(str(checkpoint)).max_len == 32


def test_a_checkpoint_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json cannot be read"):
        model_facts(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Refused, match=r"config\.json cannot be read"):
        model_facts(str(tmp_path))
    with pytest.raises(Refused, match="no such folder"):
        model_facts(str(tmp_path / "nowhere"))
    assert model_facts("some-org/never-downloaded") == ModelFacts()


def test_a_vocabulary_that_is_left_to_its_class(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "num_hidden_layers": 34}
    config = {"model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_facts(str(tmp_path)).vocab_size == 262208


# The disk -----------------------------------------------------------------------------------


def test_the_guard_counts_what_is_in_flight(tmp_path: Path) -> None:
    free = 10 * SAMPLE_OVERHEAD_BYTES
    guard = DiskGuard(tmp_path / "not" / "yet", SAMPLE_OVERHEAD_BYTES, 10, lambda folder: free)
    rows = SAMPLE_OVERHEAD_BYTES // 10
    assert guard.admits([rows] * 4)
    assert not guard.admits([rows] * 5)


def test_the_guard_learns_the_size_of_a_row(tmp_path: Path) -> None:
    guard = DiskGuard(tmp_path, 0, None, lambda folder: 0)
    assert guard.sample_bytes(10) == SAMPLE_OVERHEAD_BYTES
    guard.observe(10, 10_000)
    guard.observe(0, 0)
    assert guard.sample_bytes(10) == SAMPLE_OVERHEAD_BYTES + 10 * 1008


def test_the_guard_asks_the_disk_of_the_folder(tmp_path: Path) -> None:
    guard = DiskGuard(tmp_path / "not" / "yet", 0)
    assert guard.free_bytes() > 0


# serve --------------------------------------------------------------------------------------


def test_serve_dry_run(stagetap: Command, checkpoint: Path, tmp_path: Path) -> None:
    found = stagetap(
        *("serve", checkpoint, "--layers", "2,6", "--store", "data", "--pp", 2, "--port", 9001),
        *("--max-len", 64, "--dry-run", "--json", "--", "--seed", "3", "--no-enable-log-requests"),
    ).json
    command = found["command"]
    assert command[1:3] == ["serve", str(checkpoint)]
    options = dict(zip(command[3::2], command[4::2], strict=False))
    assert options["--stagetap-layers"] == "2,6"
    assert options["--stagetap-store"] == str(tmp_path / "data")
    assert options["--pipeline-parallel-size"] == "2"
    assert options["--port"] == "9001"
    assert "--enforce-eager" in command
    assert command[command.index("--max-model-len") + 1] == "64"
    assert command[-3:] == ["--seed", "3", "--no-enable-log-requests"]
    assert found["environment"]["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_serve_prints_a_line_for_a_shell(stagetap: Command, checkpoint: Path) -> None:
    done = stagetap("serve", checkpoint, "--layers", "2", "--store", "my data", "--dry-run")
    assert done.stdout.count("\n") == 1
    assert "VLLM_USE_V2_MODEL_RUNNER=1 " in done.stdout
    assert "my data'" in done.stdout


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ('{"slotz": 4}', "unknown key 'slotz'"),
        ('{"slots": "4"}', "slots: expected int"),
        ("slots=4", "write it like"),
        ("[1]", "must be a JSON object"),
        ('{"store": "x"}', "store has a flag of its own"),
    ],
)
@pytest.mark.parametrize("form", ["two words", "one word"])
def test_serve_checks_the_connectors_options(
    stagetap: Command, checkpoint: Path, options: str, named: str, form: str
) -> None:
    flag = "--stagetap-options"
    given = [flag, options] if form == "two words" else [f"{flag}={options}"]
    done = stagetap(
        *("serve", checkpoint, "--layers", "2", "--store", "x", "--dry-run", "--", *given)
    )
    assert (done.code, named in done.stderr) == (2, True), done.stderr


def test_serve_refuses_before_vllm(stagetap: Command, checkpoint: Path) -> None:
    done = stagetap("serve", checkpoint, "--layers", "7", "--store", "x")
    assert (done.code, "7 is above 6" in done.stderr) == (2, True)
    done = stagetap("serve", checkpoint, "--layers", "2", "--store", "s3://x", "--dry-run")
    assert (done.code, "unknown store scheme" in done.stderr) == (2, True)
    done = stagetap("serve", checkpoint, "--layers", "2", "--store", "x", "--json")
    assert (done.code, "add --dry-run" in done.stderr) == (2, True)


def test_serve_on_several_hosts_names_each_ones_part(
    stagetap: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.delenv(name, raising=False)
    found = {}
    for rank in (0, 1):
        found[rank] = stagetap(
            *("serve", checkpoint, "--layers", "2,6", "--store", "data", "--pp", 2),
            *("--nnodes", 2, "--node-rank", rank, "--master-addr", "127.0.0.1"),
            *("--dry-run", "--json", "--", "--seed", "3"),
        ).json
        command = found[rank]["command"]
        options = dict(pairwise(command))
        assert options["--nnodes"] == "2"
        assert options["--node-rank"] == str(rank)
        assert options["--master-addr"] == "127.0.0.1"
        assert options["--master-port"] == "29501"
        assert options["--distributed-executor-backend"] == "mp"
        assert command[-2:] == ["--seed", "3"]
        environment = found[rank]["environment"]
        assert environment["VLLM_HOST_IP"] == "127.0.0.1"
        assert environment["GLOO_SOCKET_IFNAME"] == "lo"
        assert "|" not in environment.get("VLLM_CPU_OMP_THREADS_BIND", "")
    assert "--headless" not in found[0]["command"]
    assert "--headless" in found[1]["command"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("--", "--nnodes=2"), "--nnodes=2 behind --: vLLM alone would not notice"),
        (("--", "--headless"), "--headless behind --: vLLM alone would not notice"),
        (("--", "--tensor_parallel_size=4"), "behind --: that is said by --tp, before the --"),
        (("--", "--stagetap-store", "y"), "--stagetap-store behind --: that is said by --store"),
        (("--nnodes", 2), "--nnodes needs --master-addr"),
        (("--node-rank", 1), "are for several hosts; add --nnodes"),
        (("--nnodes", 2, "--master-addr", "h", "--node-rank", 2), "none of 2 hosts"),
        (("--nnodes", 3, "--master-addr", "h"), "3 hosts cannot share out evenly"),
        (
            ("--nnodes", 2, "--master-addr", "127.0.0.1", "--watch-port", 29501),
            "--watch-port 29501 is --master-port too",
        ),
        (("--nnodes", 2, "--master-addr", "none.invalid"), "none.invalid is out of reach"),
    ],
)
def test_serve_refuses_what_does_not_fit(
    stagetap: Command, checkpoint: Path, given: tuple[object, ...], named: str
) -> None:
    done = stagetap(
        *("serve", checkpoint, "--layers", "2", "--store", "x", "--pp", 2, "--dry-run", *given)
    )
    assert (done.code, named in done.stderr) == (2, True), done.stderr


# doctor -------------------------------------------------------------------------------------


def test_doctor_names_what_is_wrong(
    stagetap: Command, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    done = stagetap("doctor", "--static", checkpoint, "--json")
    assert done.code == 1
    checks = {each["check"]: each for each in done.json["checks"]}
    assert checks["python"]["ok"]
    assert checks["architecture"]["found"] == ("LlamaForCausalLM, not looked up in vLLM: --static")
    assert checks["VLLM_USE_V2_MODEL_RUNNER"]["cure"] == "unset VLLM_USE_V2_MODEL_RUNNER"
    assert not checks["plugin"]["ok"]
    table = stagetap("doctor", "--static")
    assert table.code == 1
    assert "unset VLLM_USE_V2_MODEL_RUNNER" in table.stdout


def test_doctor_on_a_checkpoint(stagetap: Command, checkpoint: Path) -> None:
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": []}))
    done = stagetap("doctor", "--static", checkpoint, "--json")
    assert done.code == 1
    assert "name it in config.json" in done.stdout
    done = stagetap("doctor", "--pp", "2")
    assert done.code == 2
    assert "name the model as well" in done.stderr
    (checkpoint / "model.safetensors").unlink()
    assert "has no .safetensors file" in stagetap("doctor", "--static", checkpoint, "--json").stdout
    missing = stagetap("doctor", "--static", checkpoint, "--json").json["checks"][-2]
    assert "--pp N checks the configuration alone" in missing["cure"]
    assert "is not on this machine" in stagetap("doctor", "--static", "org/name", "--json").stdout


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "No such file"),
        ("[1]", "holds no JSON object"),
        ("5", "holds no JSON object"),
        ('"text"', "holds no JSON object"),
        ("null", "holds no JSON object"),
        ("[" * 100_000, "nested too deeply"),
        ('{"architectures": 5}', "architectures is 5, not a list of texts"),
        ('{"architectures": {}}', "architectures is {}, not a list of texts"),
        ('{"architectures": "LlamaForCausalLM"}', "architectures is 'LlamaForCausalLM', not"),
        ('{"text_config": 5}', "text_config is 5, not an object"),
        ('{"text_config": [1]}', "text_config is [1], not an object"),
        ('{"num_hidden_layers": -2}', "num_hidden_layers is -2, not a size"),
        ('{"num_hidden_layers": 1000000}', "num_hidden_layers is 1000000, not a size up to"),
        ('{"hidden_size": "64"}', "hidden_size is '64', not a size"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--pp", 2]])
def test_doctor_on_a_wrong_config(
    stagetap: Command, tmp_path: Path, config: str | None, said: str, options: list[Any]
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    done = stagetap("doctor", "--static", tmp_path, "--json", *options)
    assert done.code == 1
    (wrong,) = [each for each in done.json["checks"] if each["check"] == "model"]
    assert said in wrong["found"]
    assert "\n" not in wrong["found"]


def test_doctor_on_a_name_that_is_none(stagetap: Command, tmp_path: Path) -> None:
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    for name, said in (("x" * 5000, "no such folder"), ("folder", "Is a directory")):
        done = stagetap("doctor", "--static", name, "--pp", 2, "--json")
        assert done.code == 1
        assert said in done.json["checks"][-1]["found"]


@pytest.mark.parametrize("option", [["--layers", "2"], ["--tp", 2], ["--engine-arg", "seed=1"]])
def test_doctor_ignores_nothing(stagetap: Command, checkpoint: Path, option: list[Any]) -> None:
    done = stagetap("doctor", "--static", checkpoint, *option)
    assert done.code == 2
    assert "say on how many stages it shall run with --pp" in done.stderr


# demo ---------------------------------------------------------------------------------------


def test_the_demo_has_something_to_show(tmp_path: Path) -> None:
    file = tmp_path / "demo.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    lines = read_prompt_file(file)
    assert len(lines) == 8
    assert [line.kind for line in lines].count("messages") == 1
    assert set(owners(stage_layers(30, 2), LAYERS)) == {0, 1}


def test_only_a_demo_is_replaced_by_a_demo(tmp_path: Path) -> None:
    out = tmp_path / "demo-dataset"
    remove_earlier_demo(out)
    for name in ("commits", "nonces", "demo/sample/attempt"):
        (out / name).mkdir(parents=True)
    (out / "stagetap.json").touch()
    remove_earlier_demo(out)
    assert not out.exists()
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(Refused, match="holds something other than a demo's dataset"):
        remove_earlier_demo(out)
    file = tmp_path / "file"
    file.touch()
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    for other in (file, link):
        with pytest.raises(Refused, match="choose another --out"):
            remove_earlier_demo(other)
