"""``stagetap plan``: what it takes, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from unit.cli.commands import Command
from unit.plan.targets import LLAMA, ROOT

KIMI_K3 = ROOT / "configs" / "targets" / "kimi-k3"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A folder with the configuration of a small Llama."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def test_json_is_one_line(stagetap: Command, target: Path) -> None:
    done = stagetap("plan", target, "--layers", "2,last", "--pp", 2, "--tp", 2, "--json")
    assert done.code == 0
    assert done.json["layer_ids"] == [2, 6]
    assert done.json["id_convention"] == "after-layer"
    assert [stage["layer_ids"] for stage in done.json["stages"]] == [[2], [6]]
    assert done.json["advice"] is None
    assert done.json["kv_tokens"] is None


def test_a_file_will_do(stagetap: Command, target: Path) -> None:
    done = stagetap("plan", target / "config.json", "--layers", "2", "--json")
    assert done.json["parameters"] > 0


def test_the_table_names_owners_and_bytes(stagetap: Command, target: Path) -> None:
    done = stagetap("plan", target, "--layers", "2,3,last", "--pp", 2)
    assert done.code == 0
    assert "│ 0     │ 0-2    │ 3 full    │ 2,3       │" in done.stdout
    assert "│ 0     │ 4.0 MiB         │ 512 B      │ 768 B    │ 64.0 MiB" in done.stdout
    assert "window/seq" not in done.stdout
    assert "stored: 757.8 KiB for 1,000 tokens" in done.stdout
    assert "would move 512 B a token" in done.stdout
    assert "give --gpu-memory-gib" in done.stdout
    assert "estimated: memory for activations" in done.stdout


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_no_number_is_folded(
    stagetap: Command, target: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    arguments = ["plan", target, "--layers", "2,3,last", "--pp", 2, "--gpu-memory-gib", 80]
    whole = stagetap(*arguments).stdout
    cells = {cell.strip() for line in whole.splitlines() if "│" in line for cell in line.split("│")}
    monkeypatch.setenv("COLUMNS", str(columns))
    narrow = stagetap(*arguments).stdout
    rows = [line for line in narrow.splitlines() if line[0] in "┏┃┡│└"]
    assert max(map(len, rows)) <= columns
    assert cells == {cell.strip() for line in rows if "│" in line for cell in line.split("│")}


def test_capacity_and_advice(stagetap: Command, target: Path) -> None:
    arguments = ["plan", target, "--layers", "5,6", "--pp", 2, "--reserve-gib", 0]
    done = stagetap(*arguments, "--gpu-memory-gib", 0.1, "--max-num-batched-tokens", 90000)
    assert done.code == 0
    assert "those of the smallest stage" in done.stdout
    assert "VLLM_PP_LAYER_PARTITION=4,2" in done.stdout
    assert "the same holds without a capture" not in done.stdout


def test_what_does_not_fit_is_exit_code_1(stagetap: Command, target: Path) -> None:
    arguments = ["plan", target, "--layers", "6", "--gpu-memory-gib", 1, "--reserve-gib", 1]
    done = stagetap(*arguments, "--gpu-memory-utilization", 0.5)
    assert done.code == 1
    assert "does not fit: no room for a cache on stage 0; use more" in done.stdout
    assert "lacks " in done.stdout
    assert stagetap(*arguments, "--json").json["fits"] is False


def test_a_cache_shorter_than_one_sequence_is_exit_code_1(stagetap: Command, target: Path) -> None:
    arguments = ["plan", target, "--layers", "6", "--gpu-memory-gib", 0.1, "--reserve-gib", 0]
    batched = ["--max-num-batched-tokens", 367_600]
    done = stagetap(*arguments, *batched)
    assert done.code == 1
    assert "does not fit: vLLM does not start where the cache is shorter" in done.stdout
    assert stagetap(*arguments, *batched, "--json").json["fits"] is False
    assert stagetap(*arguments, *batched, "--max-len", 16).code == 0


@pytest.mark.parametrize(
    ("option", "values"),
    [
        *[(each, ["9" * 40]) for each in ("--max-num-batched-tokens", "--max-len", "--tp", "--pp")],
        ("--gpu-memory-gib", ["inf", "nan", "1e300"]),
        ("--reserve-gib", ["inf", "nan", "1e300"]),
        ("--gpu-memory-utilization", ["inf", "nan"]),
    ],
)
def test_numbers_beyond_any_engine_are_refused(
    stagetap: Command, target: Path, option: str, values: list[str]
) -> None:
    for value in values:
        done = stagetap("plan", target, "--layers", "2", "--gpu-memory-gib", 1, option, value)
        assert done.code == 2
        assert f"'{option}'" in done.stderr


def test_the_stream_says_who_owns_a_tap_at_a_cut(stagetap: Command, target: Path) -> None:
    def owners(*arguments: str) -> list[list[int]]:
        done = stagetap("plan", KIMI_K3, "--pp", 2, "--layers", "2,47,93", "--json", *arguments)
        return [stage["layer_ids"] for stage in done.json["stages"]]

    assert owners() == owners("--stream", "prefix_sum") == [[2, 47], [93]]
    assert owners("--stream", "attn_res_mixture") == [[2], [47, 93]]
    for model, stream in ((KIMI_K3, "residual"), (target, "prefix_sum"), (target, "mixture")):
        done = stagetap("plan", model, "--layers", "2", "--stream", stream)
        assert done.code == 2
        assert f"stream '{stream}': this model's taps are of" in done.stderr


def test_the_partition_is_vllms(
    stagetap: Command, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def layers(*arguments: Any) -> Any:
        done = stagetap("plan", target, "--layers", "6", "--pp", 2, "--json", *arguments)
        return [stage["layers"] for stage in done.json["stages"]]

    assert layers() == [[0, 3], [3, 6]]
    assert layers("--partition", "2,4") == [[0, 2], [2, 6]]
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,2")
    done = stagetap("plan", target, "--layers", "6", "--pp", 2)
    assert done.code == 2
    assert "VLLM_PP_LAYER_PARTITION: partition 5,2 must have 2 parts" in done.stderr
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,1")
    assert layers() == [[0, 5], [5, 6]]
    assert layers("--partition", "1,5") == [[0, 1], [1, 6]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--layers", "eagle3"], "eagle3 would tap [2, 3, 3, 6]"),
        (["--layers", "2", "--tp", 3], "num_attention_heads 4 does not divide by --tp 3"),
        (["--layers", "2", "--pp", 7], "7 pipeline stages are more than"),
        (["--layers", "2", "--pp", 2, "--partition", "9"], "must have 2 parts"),
        (["--layers", "2", "--partition", "9"], "must have 1 part that"),
        (["--layers", "2", "--partition", "1_0"], "partition '1_0'"),
        (["--layers", "2", "--max-len", 513], "--max-len 513 is above the 512 positions"),
        (["--layers", "2", "--partition", "3,3"], "is for 2 stages and --pp is 1; say --pp 2"),
        (["--layers", "2", "--dtype", "int8"], "'int8'"),
        (["--layers", "2", "--partition", ""], "partition '': write the number of layers"),
        (["--layers", "2", "--dtype", "float64"], "use auto or one of bfloat16, float16, half"),
        (["--layers", "dflash:100000"], "dflash:100000: K is too large"),
        (["--layers", "2", "--kv-cache-dtype", "int3"], "int3"),
    ],
)
def test_refusals_are_one_line(
    stagetap: Command, target: Path, arguments: list[Any], said: str
) -> None:
    done = stagetap("plan", target, *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("stagetap: refused: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_is_not_here_is_refused(stagetap: Command, tmp_path: Path) -> None:
    assert "no such folder" in stagetap("plan", "./nowhere", "--layers", "2").stderr
    done = stagetap("plan", "nobody/nothing-at-all", "--layers", "2")
    assert done.code == 2
    assert "not on this machine" in done.stderr
    assert "no such folder" in stagetap("plan", "x" * 5000, "--layers", "2").stderr
    assert "no such folder" in stagetap("plan", "a b/" + "c" * 200, "--layers", "2").stderr
    (tmp_path / "folder" / "config.json").mkdir(parents=True)
    assert "Is a directory" in stagetap("plan", "folder", "--layers", "2").stderr
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert "nested too deeply" in stagetap("plan", "deep.json", "--layers", "2").stderr
    (tmp_path / "list.json").write_text("[]")
    assert "holds no JSON object" in stagetap("plan", "list.json", "--layers", "2").stderr


@pytest.mark.parametrize("name", ["kimi-k3", "deepseek-v3", "qwen3-235b-a22b"])
@pytest.mark.parametrize("layers", ["eagle3", "dflash:5", "dspark:4"])
def test_the_targets_plan(stagetap: Command, name: str, layers: str) -> None:
    folder = ROOT / "configs" / "targets" / name
    done = stagetap("plan", folder, "--layers", layers, "--pp", 4, "--tp", 4, "--json")
    assert done.code == 0
    assert done.json["layer_ids"][-1] == done.json["num_hidden_layers"]


def test_a_type_is_shown_within_its_line(stagetap: Command, target: Path) -> None:
    hostile = {"model_type": "a\u202e\x1b[31m" + "b" * 100_000, "tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps({**LLAMA, **hostile}))
    done = stagetap("plan", target, "--layers", "2")
    assert done.code == 0
    assert len(done.stdout) < 5000
    assert not {"\u202e", "\x1b"} & set(done.stdout)


def test_the_file_of_a_draft_is_named(stagetap: Command, target: Path) -> None:
    (target / "draft.json").write_text('{"eagle_aux_hidden_state_layer_ids": [2, 40]}')
    done = stagetap("plan", target, "--layers", target / "draft.json")
    assert done.code == 2
    assert "draft.json names ids that do not fit: 40 is above 6" in done.stderr
