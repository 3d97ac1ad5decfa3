"""A recipe that goes together, and one refusal for each value that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stagetap.cli.doctor_config import Expectations
from stagetap.cli.doctor_recipe import examine
from stagetap.errors import Refused
from stagetap.findings import Finding
from unit.recipe.recipes import DRAFT, ENGINE_NODES, RECIPE, changed, filled, written


def problems(folder: Path, document: dict[str, Any]) -> list[Finding]:
    """What is wrong, each in one line; nothing is started then."""
    findings, to_start = examine(written(folder, document), Expectations())
    wrong = [finding for finding in findings if not finding.ok]
    assert all("\n" not in finding.found + str(finding.cure) for finding in findings)
    assert bool(to_start) is not bool(wrong)
    return wrong


def test_the_shipped_recipe_filled_in_is_well(tmp_path: Path) -> None:
    findings, to_start = examine(written(tmp_path, filled()), Expectations())
    assert [finding for finding in findings if not finding.ok] == []
    assert len({start.node for start in to_start}) == 8


def test_the_shipped_recipe_as_it_is_names_what_is_open() -> None:
    (finding,), to_start = examine(RECIPE, Expectations())
    assert not finding.ok
    assert "leaves target, draft, engines.nodes[0][0]" in finding.found
    assert to_start == []


MIXTURE, PREFIX = "attn_res_mixture", "prefix_sum"


@pytest.mark.parametrize(
    ("changes", "check", "found", "cure"),
    [
        ({"gpus": 32}, "GPUs and nodes", ("32 GPUs", "8,", "for 32 on 8"), "gpus: 40"),
        ({"nodes": 10}, "GPUs and nodes", ("8 nodes", "40 on 10"), "nodes: 8"),
        (
            {"trainer__nodes": ["10.0.0.1", "10.0.0.6", "10.0.0.7", "10.0.0.8"]},
            "GPUs and nodes",
            ("10.0.0.1 is named twice",),
            "name each node once",
        ),
        (
            {"trainer__nodes": ["Node", "node", "c", "d"]},
            "GPUs and nodes",
            ("Node is named twice",),
            "name each node once",
        ),
        (
            {"trainer__nodes": ["fd00::5", "fd00:0::5", "c", "d"]},
            "GPUs and nodes",
            ("fd00::5 is named twice",),
            "name each node once",
        ),
        ({"engines__tp": 4}, "world size and TP", ("16 GPUs", "tp 4 are 8"), "set tp to 8"),
        ({"engines__pp": 3}, "world size and TP", ("16 GPUs", "are 24"), "divisor of 16"),
        (
            {"engines__layers": "2,23,47,69,91,93"},
            "layers and draft",
            ("target_layer_ids 1,23,46,68,90", "24 of these is not captured"),
            "capture 2,24,47,69,91,93",
        ),
        (
            {"engines__layers": "1,23,46,68,90,93"},
            "layers and draft",
            ("one less than taps", "2,24,47,69,91 of these are not captured"),
            "capture 2,24,47,69,91,93",
        ),
        (
            {"engines__layers": "2,24,47,69,91"},
            "layers and draft",
            ("93 of these is not captured",),
            "capture 2,24,47,69,91,93",
        ),
        (
            {"engines__stream": PREFIX},
            "stream and draft",
            (f"stream is {PREFIX}", f"reads {MIXTURE}"),
            f"set engines.stream to {MIXTURE}, or fc_norm to false",
        ),
        (
            {"trainer__min_loss_tokens": 13},
            "blocks and loss tokens",
            ("fewer than 13", "blocks of 7"),
            "min-loss-tokens to 14",
        ),
        (
            {"trainer__min_loss_tokens": 8193},
            "blocks and loss tokens",
            ("fewer than 8193",),
            "below 8192 (trainer.total-seq-len): no row is left",
        ),
        (
            {"trainer__total_seq_len": 8191},
            "sample and batch",
            ("8,192 tokens", "total-seq-len 8,191"),
            "total-seq-len to 8192",
        ),
        (
            {"engines__max_len": 8192},
            "sample and batch",
            ("8,191 tokens", "total-seq-len 8,192"),
            "max-len to 8193",
        ),
        (
            {"expected__tokens_in_flight": 393_215},
            "tokens in flight",
            ("393,216 tokens", "are 393,215"),
            "at least 393216",
        ),
        (
            {"store__segment_bytes": 67_652_026_367},
            "segments and bytes in flight",
            ("270,608,105,472 B", "67,652,026,367 B each"),
            "segment-bytes to at least 67652026368",
        ),
        (
            {"store__segment_bytes": 67_652_026_368, "store__options__replicas": 2},
            "segments and bytes in flight",
            ("in 2 copies are 541,216,210,944 B", "67,652,026,368 B each"),
            "at least 135304052736, or expected.tokens-in-flight to at most 1572864",
        ),
        (
            {"store__options__replicas": 5},
            "copies and lenders",
            ("5 copies", "4 lend"),
            "replicas to at most 4",
        ),
        (
            {"store__lease": "119s"},
            "lease and consume time",
            ("lasts 119 s", "removed 120 s"),
            "store.lease to at least 120s",
        ),
        (
            {"trainer__fetch_wait": "170s"},
            "fetch wait and publishing",
            ("waits 170 s", "committed 170 s"),
            "fetch-wait above 170s",
        ),
        (
            {"store__options__force_remove": False},
            "lease and removal",
            ("lease is 180 s", "lease_wait 15 s"),
            "set lease_wait above 180",
        ),
        (
            {"store__options__put_timeout": "50s"},
            "publishing",
            ("170 s", "170 s (publish_timeout_s)"),
            "publish_timeout_s above 170",
        ),
        (
            {"store__options__space_wait": "119s"},
            "time until consumed",
            ("removed 120 s", "waits 119 s"),
            "space_wait to at least 120",
        ),
        (
            {"store__options__hard_pin": False},
            "time until consumed",
            ("nothing is pinned hard",),
            "or hard_pin=on",
        ),
    ],
)
def test_values_that_do_not_go_together(
    changes: dict[str, Any], check: str, found: tuple[str, ...], cure: str, tmp_path: Path
) -> None:
    (finding,) = problems(tmp_path, changed(**changes))
    assert finding.check == check
    for part in found:
        assert part in finding.found
    assert cure in str(finding.cure)


def test_a_trainer_less_patient_than_the_store_is_slow(tmp_path: Path) -> None:
    wrong = problems(tmp_path, changed(trainer__fetch_wait="120s"))
    assert [finding.check for finding in wrong] == [
        "fetch wait and publishing",
        "fetch wait and consume time",
    ]
    assert "above 120s, or expected.consume-time below 120s" in str(wrong[1].cure)


def test_engines_of_different_sizes(tmp_path: Path) -> None:
    document = changed(engines__nodes=[[*ENGINE_NODES[0], "10.0.0.9"], ["10.0.0.3"]])
    (finding,) = problems(tmp_path, document)
    assert finding.check == "world size and TP"
    assert "one engine has 8 GPUs and another 24" in finding.found


@pytest.mark.parametrize(
    ("place", "argument", "says"),
    [
        ("engines__extra_args", "--tensor-parallel-size=4", "engines.tp"),
        ("engines__extra_args", "--pipeline_parallel_size", "engines.pp"),
        ("engines__extra_args", "-tp", "engines.tp"),
        ("engines__extra_args", "-tp4", "engines.tp"),
        ("engines__extra_args", "-pp2", "engines.pp"),
        ("engines__extra_args", "-n3", "engines.nodes"),
        ("engines__extra_args", "-r1", "engines.nodes"),
        ("engines__extra_args", "--nnodes", "engines.nodes"),
        ("engines__extra_args", "--headless", "engines.nodes"),
        ("engines__extra_args", "--max-model-l", "engines.max-len"),
        ("engines__extra_args", "--kv-transfer-config.kv_role", "engines.layers and store"),
        ("engines__extra_args", "--port", "--port of stagetap serve"),
        ("engines__extra_args", "--max-num-seqs", "engines.max-num-seqs"),
        ("engines__extra_args", "--stagetap-options", "engines.options"),
        ("engines__extra_args", "--enable-expert-parallel", "engines.expert-parallel"),
        ("engines__extra_args", "-ep", "engines.expert-parallel"),
        ("trainer__extra_args", "--epochs", "the recipe's own --epochs"),
        ("trainer__extra_args", "--stagetap-wait-s=1", "the recipe's own --stagetap-wait-s"),
        ("trainer__extra_args", "--draft-config", "the recipe's own --draft-config"),
        ("trainer__extra_args", "--epo=2", "the recipe's own --epochs"),
        ("trainer__extra_args", "--data-p", "the recipe's own --data-path"),
        ("trainer__extra_args", "--save-path=/x", "the recipe's own --save-path"),
        ("trainer__extra_args", "--stagetap-stream=prefix_sum", "engines.stream"),
        ("trainer__extra_args", "--stagetap-sto", "the recipe's own --stagetap-store"),
        ("trainer__extra_args", "--stagetap-run=x", "store.run"),
        ("trainer__extra_args", "--stagetap-target", "target"),
        ("trainer__extra_args", "--stagetap-of-tomorrow", "the recipe's keys"),
        ("trainer__extra_args", "--from-pretrained=/x", "the draft's config.json"),
        ("trainer__extra_args", "--target-layer-ids", "the draft's config.json"),
        ("trainer__extra_args", "--block-size=8", "the draft's config.json"),
        ("trainer__extra_args", "--block", "the draft's config.json"),
        ("trainer__extra_args", "--no-enable-conf", "the draft's config.json"),
        ("trainer__extra_args", "--mooncake-protocol", "store"),
    ],
)
def test_extra_arguments_do_not_contradict(
    place: str, argument: str, says: str, tmp_path: Path
) -> None:
    (finding,) = problems(tmp_path, changed(**{place: [argument, "4"]}))
    assert finding.check == "protected keys"
    assert finding.found.startswith(f"{argument} among options or extra arguments contradicts ")
    assert says in finding.found
    assert says in str(finding.cure)


@pytest.mark.parametrize(
    ("argument", "cure"),
    [
        ("--dtype=float32", "target's config.json"),
        ("--hf-overrides.num_hidden_layers", "target's config.json"),
        ("--hf_config_path", "target's config.json"),
        ("--revision", "target's config.json"),
        ("-q=fp8", "target's config.json"),
        ("-qfp8", "target's config.json"),
        ("--quant", "target's config.json"),
        ("--model-impl", "target's config.json"),
        ("--kv-cache-dtype=fp8", "cache of other precision"),
        ("--mamba_ssm_cache_dtype", "cache of other precision"),
        ("--kv-sharing-fast-prefill", "skip tokens"),
        ("--data-parallel-size", "each replica in engines.nodes"),
        ("--data-parallel-external-lb", "each replica in engines.nodes"),
        ("-dp2", "each replica in engines.nodes"),
        ("-dpl", "each replica in engines.nodes"),
        ("--prefill-context-parallel-size", "spread over ranks"),
        ("-dcp2", "spread over ranks"),
        ("-pcp=2", "spread over ranks"),
        ("--enable-eplb", "experts would lie otherwise"),
        ("--distributed-executor-backend=ray", "engines.nodes"),
        ("--speculative-config.method", "speculative decoding"),
        ("-sc", "speculative decoding"),
        ("--spec-method=ngram", "speculative decoding"),
        ("--enable-lora", "LoRA adapters"),
        ("--enable-sleep-mode", "sleep mode"),
        ("--weight-transfer-config", "weight updates"),
        ("--ubatch-size=2", "microbatching"),
        ("--kv-offloading-size", "offloading connector"),
        ("--runner", "generates nothing"),
        ("--scheduler-cls", "another scheduler"),
        ("--worker-cls", "StageTap stands in"),
        ("--config", "into engines.extra-args"),
    ],
)
def test_extra_arguments_do_not_make_another_engine(
    argument: str, cure: str, tmp_path: Path
) -> None:
    (finding,) = problems(tmp_path, changed(engines__extra_args=[argument, "2"]))
    assert finding.check == "protected keys"
    assert finding.found.startswith(f"{argument} among engines.extra-args ")
    assert cure in str(finding.cure)


@pytest.mark.parametrize(
    ("argument", "cure"),
    [
        ("--config=/x.yaml", "into trainer.extra-args"),
        ("--dump-config", "the trainer would end"),
        ("--dry", "the trainer would end"),
    ],
)
def test_extra_arguments_do_not_make_another_training(
    argument: str, cure: str, tmp_path: Path
) -> None:
    (finding,) = problems(tmp_path, changed(trainer__extra_args=[argument]))
    assert finding.found.startswith(f"{argument} among trainer.extra-args ")
    assert cure in str(finding.cure)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--stagetap-verify", "checksums"],
        ["--stagetap-v=sizes"],
        ["--stagetap-metrics=/curve.jsonl"],
        ["--draft-attn-impl", "sdpa"],
        ["--confidence-head-alpha", "0.5"],
        ["--max-steps", "3"],
        ["--lr=-1"],
    ],
)
def test_extra_arguments_that_the_recipe_leaves_to_the_trainer(
    arguments: list[str], tmp_path: Path
) -> None:
    assert problems(tmp_path, changed(trainer__extra_args=arguments)) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--load-format=dummy"],
        ["--load-format", "sharded_state"],
        ["--load_format"],
        ["--load-format", "auto", "--load-format", "dummy"],
    ],
)
def test_weights_are_the_targets(arguments: list[str], tmp_path: Path) -> None:
    (finding,) = problems(tmp_path, changed(engines__extra_args=arguments))
    assert finding.found.startswith(arguments[-2] if arguments[1:] else arguments[0])
    assert "other weights than the target's" in finding.found
    assert "say one of auto, " in str(finding.cure)


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("export_default", "off", 'set export_default to "on"'),
        ("on_nonfinite", "store", "set on_nonfinite to fail"),
    ],
)
def test_every_prompt_becomes_a_sample(option: str, value: str, says: str, tmp_path: Path) -> None:
    (finding,) = problems(tmp_path, changed(**{f"engines__options__{option}": value}))
    assert finding.check == "captured prompts"
    assert f"{option} {'is ' if option == 'export_default' else ''}{value}" in finding.found
    assert says in str(finding.cure)


def test_silence_does_not_export(tmp_path: Path) -> None:
    (finding,) = problems(tmp_path, changed(engines__options={"publish_timeout_s": 170}))
    assert "export_default is off" in finding.found


def test_experts_are_laid_out_as_the_recipe_says(tmp_path: Path) -> None:
    assert problems(tmp_path, changed(engines__expert_parallel=True)) == []


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        (["--max-num-batched-tokens", "23"], "a number from 24"),
        (["--max_num_batched_tokens=8k"], "a plain number"),
        (["--max-num-batched-tokens"], "a plain number"),
        (["--max-num-batched-tokens", "9" * 5000], "a number from 24"),
        (["--max-num-batched-tokens=8192", "--max-num-batched-tokens=23"], "a number from 24"),
    ],
)
def test_a_step_has_room_for_every_sequence(
    arguments: list[str], cure: str, tmp_path: Path
) -> None:
    (finding,) = problems(tmp_path, changed(engines__extra_args=arguments))
    assert finding.check == "step and sequences"
    assert cure in str(finding.cure)


@pytest.mark.parametrize(
    "argument",
    [
        *("-dc={}", "--enforce-eager", "-cc.mode=0", "-ac.backend=X", "--log-level=debug"),
        *("--gpu-memory-utilization=0.8", "--load-format=runai_streamer", "--tokenizer=/x"),
        *("--api-server-count=2", "--moe-backend=triton"),
    ],
)
def test_extra_arguments_that_change_no_sum(argument: str, tmp_path: Path) -> None:
    assert problems(tmp_path, changed(engines__extra_args=[argument])) == []


def test_options_do_not_contradict(tmp_path: Path) -> None:
    document = changed(store__options__global_segment_size="1GiB")
    (finding,) = problems(tmp_path, document)
    assert "global_segment_size among options" in finding.found
    assert "store.segment-bytes" in str(finding.cure)
    (finding,) = problems(tmp_path, changed(store__options__host="10.0.0.5"))
    assert "host among options" in finding.found
    (finding,) = problems(tmp_path, changed(engines__options__run_id="k3-dspark"))
    assert "run_id among options" in finding.found
    assert "change store.run" in str(finding.cure)


# The draft and the target --------------------------------------------------------------------


def draft_with(folder: Path, **values: Any) -> str:
    file = folder / "draft.json"
    file.write_text(json.dumps(json.loads(DRAFT.read_text("utf-8")) | values))
    return str(file)


def test_a_draft_without_fc_norm_has_no_targets(tmp_path: Path) -> None:
    plain = draft_with(tmp_path, fc_norm=False)
    (finding,) = problems(tmp_path, changed(draft=plain))
    assert f"stream is {MIXTURE}" in finding.found
    assert f"(fc_norm false) reads {PREFIX}" in finding.found
    (finding,) = problems(tmp_path, changed(draft=plain, engines__stream=PREFIX))
    assert "not what the target's head reads" in finding.found
    assert f"set fc_norm to true and engines.stream to {MIXTURE}" in str(finding.cure)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"mask_token_id": None}, "says no mask_token_id"),
        ({"mask_token_id": -1}, "mask_token_id is -1, its vocab_size 163840"),
        ({"mask_token_id": 163840}, "mask_token_id is 163840, its vocab_size 163840"),
        ({"mask_token_id": "x"}, "mask_token_id is 'x', not an integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, not a size"),
        ({"markov_rank": None}, "says no markov_rank"),
        ({"target_layer_ids": [1, 23, 46, 68, 93]}, "94 is above 93"),
        ({"target_num_hidden_layers": 61}, "made for a target of 61 layers"),
        # These say K3DSparkConfig's own checks.
        ({"logit_scale": 2.0}, "logit_scale is 2.0: input should be less"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated': input should be 'vanilla'"),
        ({"rope_parameters": {"rope_type": "yarnish"}}, "yarnish"),
        ({"num_attention_heads": "64"}, "num_attention_heads"),
        ({"kv_lora_rank": -1}, "kv_lora_rank is -1, not a size"),
        ({"enable_confidence_head": "on"}, "enable_confidence_head is 'on', not true or false"),
        ({"rope_scaling": 5}, "rope_scaling is 5: input should be a valid dictionary"),
        ({"dtype": "float17"}, "float17"),
    ],
)
def test_a_draft_that_is_not_built(values: dict[str, Any], says: str, tmp_path: Path) -> None:
    (finding,) = problems(tmp_path, changed(draft=draft_with(tmp_path, **values)))
    assert says in finding.found


@pytest.mark.parametrize(
    ("values", "found", "cure"),
    [
        (
            {"vocab_size": 163841, "draft_vocab_size": None},
            "says vocab_size 163841, the target vocab_size 163840",
            "set vocab_size to 163840",
        ),
        (
            {"hidden_size": 4096, "target_hidden_size": None},
            "says hidden_size 4096, the target hidden_size 7168",
            "set hidden_size to 7168",
        ),
        (
            {"target_hidden_size": 4096},
            "says target_hidden_size 4096, the target hidden_size 7168",
            "set target_hidden_size to 7168",
        ),
    ],
)
def test_a_draft_of_another_target(
    values: dict[str, Any], found: str, cure: str, tmp_path: Path
) -> None:
    (finding,) = problems(tmp_path, changed(draft=draft_with(tmp_path, **values)))
    assert finding.check == "draft and target"
    assert found in finding.found
    assert cure in str(finding.cure)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-anchor-count", "3"], "unrecognized arguments: --max-anchor-count 3"),
        (["--num-workers", "four"], "invalid int value: 'four'"),
        (["--num-workers"], "expected one argument"),
        (["--help"], "ask for help"),
    ],
)
def test_arguments_that_the_trainer_does_not_take(
    arguments: list[str], says: str, tmp_path: Path
) -> None:
    (finding,) = problems(tmp_path, changed(trainer__extra_args=arguments))
    assert finding.check == "draft and trainer"
    assert says in finding.found
    assert "stagetap train --help" in str(finding.cure)


def test_blocks_of_another_size(tmp_path: Path) -> None:
    (finding,) = problems(tmp_path, changed(draft=draft_with(tmp_path, block_size=8)))
    assert "fewer than 14" in finding.found
    assert "blocks of 8" in finding.found
    assert "min-loss-tokens to 16" in str(finding.cure)


def test_a_target_with_one_stream(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    config = {"num_hidden_layers": 93, "hidden_size": 7168, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    (finding,) = problems(tmp_path, changed(target=str(folder)))
    assert finding.check == "stream and draft"
    assert "has one residual stream" in finding.found


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "nowhere"}, "model nowhere: no such folder"),
        ({"target": "org/never-downloaded"}, "no config.json here says its num_hidden_layers"),
        ({"draft": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"engines__layers": "2,94"}, "94 is above 93"),
        ({"engines__tp": 5}, "num_attention_heads 96 does not divide by engines.tp 5"),
        ({"engines__pp": 96}, "96 pipeline stages are more than the model's 93"),
        ({"engines__max_len": 2**31 - 1}, "is above the 1048576 positions"),
        ({"store__lease": f"{'9' * 400}s"}, "is out of range: give at most 1000000000s"),
        ({"engines__options__publish_timeout": 3}, "unknown key 'publish_timeout'"),
        ({"store__options__hard_pins": True}, "unknown option 'hard_pins'"),
        ({"store__lease": "3 minutes"}, "store.lease: '3 minutes' is no time"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    (finding,) = problems(tmp_path, changed(**changes))
    assert says in finding.found


def test_another_kind_of_draft(tmp_path: Path) -> None:
    (finding,) = problems(tmp_path, changed(draft=draft_with(tmp_path, model_type="qwen3")))
    assert "has model_type 'qwen3', a recipe trains k3_dspark" in finding.found


def test_what_a_recipe_says_is_not_said_beside_it() -> None:
    with pytest.raises(Refused, match="is a recipe, which says itself"):
        examine(RECIPE, Expectations(lease="3s"))
