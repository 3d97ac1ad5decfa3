"""The commands of a recipe are commands that StageTap has."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from stagetap.layer_choice import spread
from stagetap.recipe.commands import Start, starts, store_uri
from stagetap.recipe.document import read_recipe
from stagetap.stores.mooncake_uri import parse_uri
from unit.cli.commands import Command, make_command
from unit.recipe.recipes import DRAFT, RECIPE, TARGET, TRAINER_NODES, changed, filled, written


@pytest.fixture
def stagetap(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setenv("COLUMNS", "200")
    return make_command(monkeypatch, capfd)


@pytest.fixture
def to_start() -> list[Start]:
    recipe = read_recipe(filled(), "recipe.yaml")
    return starts(recipe, json.loads(DRAFT.read_text("utf-8")))


def of(to_start: list[Start], role: str) -> list[Start]:
    return [start for start in to_start if start.role.startswith(role)]


def after(command: list[str], flag: str) -> str:
    return command[command.index(flag) + 1]


def test_prompts_and_store_come_first_and_the_trainer_last(to_start: list[Start]) -> None:
    roles = [start.role.split()[0] for start in to_start]
    assert roles == ["prompts", "store", *["memory"] * 4, *["engine"] * 4, *["trainer"] * 4]


def test_the_store(to_start: list[Start]) -> None:
    (store,) = of(to_start, "store")
    assert shlex.join(store.command) == (
        "stagetap store up --host 10.0.0.5 --port 50051 --lease-ms 180000"
    )
    memory = of(to_start, "memory")
    assert [start.node for start in memory] == TRAINER_NODES
    for start in memory:
        assert "-master_server_address=10.0.0.5:50051" in start.command
        assert "-global_segment_size=512000000000" in start.command
        assert f"-host={start.node}" in start.command


def test_memory_is_lent_as_the_address_says() -> None:
    document = changed(
        store__options__protocol="rdma",
        store__options__device_names="mlx5_0,mlx5_1",
        store__options__metadata_server="http://10.0.0.5:8080/metadata?a=1&b=2",
        store__run="a run/1?x=2",
    )
    recipe = read_recipe(document, "recipe.yaml")
    store = parse_uri(store_uri(recipe))
    assert (store.run, store.global_segment_size) == ("a run/1?x=2", 0)
    for start in of(starts(recipe, json.loads(DRAFT.read_text("utf-8"))), "memory"):
        assert "-protocol=rdma" in start.command
        assert "-device_names=mlx5_0,mlx5_1" in start.command
        assert f"-metadata_server={store.metadata_server}" in start.command


def test_ipv6_nodes_have_brackets_where_a_port_follows() -> None:
    nodes = ["fd00::5", "fd00::6", "fd00::7", "fd00::8"]
    recipe = read_recipe(changed(trainer__nodes=nodes), "recipe.yaml")
    to_start = starts(recipe, json.loads(DRAFT.read_text("utf-8")))
    (store,) = of(to_start, "store")
    assert after(store.command, "--host") == "[fd00::5]"
    assert parse_uri(store_uri(recipe)).master == "[fd00::5]:50051"
    assert "-host=[fd00::6]" in of(to_start, "memory")[1].command
    assert {after(start.command, "--master-addr") for start in of(to_start, "trainer")} == {
        nodes[0]
    }
    assert [start.node for start in of(to_start, "trainer")] == nodes


def test_times_have_no_exponent() -> None:
    recipe = read_recipe(changed(trainer__fetch_wait="1234567s"), "recipe.yaml")
    trainer, *_ = of(starts(recipe, json.loads(DRAFT.read_text("utf-8"))), "trainer")
    assert after(trainer.command, "--stagetap-wait-s") == "1234567"


def test_prompts_are_in_the_trainers_order(to_start: list[Start]) -> None:
    (prompts,) = of(to_start, "prompts")
    trainer = of(to_start, "trainer")[0].command
    assert prompts.command[:5] == ["stagetap", "train-prompts", "/data/rows", "--out", "/p.jsonl"]
    assert after(prompts.command, "--ranks") == "8"
    assert after(prompts.command, "--min-loss-tokens") == "14"
    for flag in ("--total-seq-len", "--seed", "--train-data-ratio"):
        assert after(prompts.command, flag) == after(trainer, flag)


def test_stagetap_serve_takes_the_engines(
    to_start: list[Start], stagetap: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for start in of(to_start, "engine"):
        assert start.environment == {"VLLM_KIMI_K3_AUX_ATTN_RES_STREAM": "1"}
        monkeypatch.setenv("VLLM_HOST_IP", start.node)
        program, command, *arguments = start.command
        assert (program, command) == ("stagetap", "serve")
        store = parse_uri(after(arguments, "--store"))
        assert (store.hard_pin, store.force_remove, store.space_wait) == (True, True, 120.0)
        assert store.global_segment_size == 0
        # A dry run asks the store's master, so it gets a directory in its place.
        arguments[arguments.index("--store") + 1] = "dataset"
        done = stagetap("serve", "--dry-run", "--json", *arguments)
        assert done.code == 0, done.stderr
        vllm = done.json["command"]
        assert after(vllm, "--stagetap-layers") == "2,24,47,69,91,93"
        assert after(vllm, "--pipeline-parallel-size") == "2"
        assert after(vllm, "--tensor-parallel-size") == "8"
        assert after(vllm, "--max-model-len") == "8193"
        assert after(vllm, "--max-num-seqs") == "24"
        assert ("--headless" in vllm) is start.role.endswith("node 1")


def test_an_engine_on_one_node_says_no_hosts() -> None:
    document = changed(engines__nodes=[["10.0.0.1"]])
    (start,) = of(
        starts(read_recipe(document, "recipe.yaml"), {"mask_token_id": 1, "vocab_size": 2}),
        "engine",
    )
    assert "--nnodes" not in start.command


def test_the_trainers_are_one_torchrun(to_start: list[Start]) -> None:
    for rank, start in enumerate(of(to_start, "trainer")):
        assert start.node == TRAINER_NODES[rank]
        assert start.command[:3] == ["torchrun", "--nnodes", "4"]
        assert after(start.command, "--node-rank") == str(rank)
        assert after(start.command, "--nproc-per-node") == "2"
        assert after(start.command, "--master-addr") == "10.0.0.5"


def test_the_doctor_prints_them(stagetap: Command, tmp_path: Path) -> None:
    file = written(tmp_path, filled())
    done = stagetap("doctor", "--static", "--config", file)
    for node in (*("10.0.0.1", "10.0.0.4"), *TRAINER_NODES):
        assert f"\n{node}: " in done.stdout
    assert "    VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1 stagetap serve " in done.stdout
    said = stagetap("doctor", "--static", "--json", "--config", file).json
    assert len(said["starts"]) == 14
    unfilled = stagetap("doctor", "--static", "--json", "--config", RECIPE)
    assert (unfilled.code, unfilled.json["starts"]) == (1, [])


def test_the_plan_in_the_comments(stagetap: Command) -> None:
    comments = RECIPE.read_text("utf-8")
    words = shlex.split(
        comments[comments.index("stagetap plan ") :].split("nodes:")[0].replace("#", " ")
    )
    assert words[2] == "configs/targets/kimi-k3"
    arguments = [word for word in words[3:] if word.strip()]
    said = stagetap("plan", TARGET, *arguments, "--json").json
    engines = filled()["engines"]
    assert (said["pp"], said["tp"]) == (engines["pp"], engines["tp"])
    weights = max(sum(stage["weight_bytes"].values()) for stage in said["stages"])
    assert f"up to {weights / 2**30:.1f} GiB of weights" in comments
    sequences = said["kv_tokens"] // (engines["max-len"] - 1)
    assert f"room for {said['kv_tokens']:,} tokens, {sequences} sequences" in comments
    assert engines["max-num-seqs"] <= sequences


def test_the_arithmetic_in_the_comments() -> None:
    """Each number, computed from what it is said to come from, stands there."""
    config = json.loads((TARGET / "config.json").read_text("utf-8"))["text_config"]
    document = filled()
    engines, trainer = document["engines"], document["trainer"]
    in_flight = document["expected"]["tokens-in-flight"]
    hidden, layers = config["hidden_size"], engines["layers"].split(",")
    token = len(layers) * hidden * 2 + 8
    sample = engines["max-len"] - 1
    held = engines["max-num-seqs"] * sample
    ranks = len(trainer["nodes"]) * trainer["gpus-per-node"]
    lent = len(trainer["nodes"]) * document["store"]["segment-bytes"]
    trained = 3_562_348_801 - config["vocab_size"] * hidden
    ahead = 4 * 2 * sample * (token - 8)
    assert layers == [*map(str, spread(93, 5)), "93"]
    assert in_flight == 8 * 2 * held
    comments = RECIPE.read_text("utf-8")
    for number in (
        f"= {token:,} B",
        f"{sample * token:,} B",
        f"{held:,} tokens",
        f"= {4 * hidden * 2 * 8192:,} B a GPU",
        f"hold {lent // token:,} tokens",
        f"{in_flight:,} tokens, is {in_flight * token:,} B: {100 * in_flight * token // lent} %",
        f"{trained:,} of them trained",
        f"{config['vocab_size'] * hidden:,} stay",
        f"{ahead:,} B",
        f"are {2 * held:,}",
        f"= {-(-in_flight // 120):,} tokens a second, {-(-in_flight // 120 // ranks):,} a GPU",
    ):
        assert number in comments
