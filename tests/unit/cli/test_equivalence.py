"""``stagetap equivalence`` with captures that write made-up states through the real store."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

import stagetap.equivalence.prove as prove_module
from stagetap.engine.environment import cores_by_rank
from stagetap.equivalence.arms import Arm, run_arm, write_prompts
from stagetap.equivalence.made_prompts import prompts_of_lengths
from stagetap.errors import Refused, StageTapError
from stagetap.fingerprint import weights_fingerprint
from stagetap.manifest import token_digest
from stagetap.partition import stage_layers
from stagetap.prompts import read_prompt_file, tokenize
from store_samples import Engine, drain, job, manifest, owned, tapped, token_ids
from unit.cli.commands import Command, Outcome

LAYERS = "2,0,4,6"


class Captures:
    """Stands for the capture processes; ``spoil`` changes what an arm of several stages stores."""

    def __init__(self) -> None:
        self.arms: list[Arm] = []
        self.prompts: list[list[int]] = []
        self.misplace = False
        self.flip_bit_of: str | None = None

    def __call__(self, arm: Arm, prompts: Path, out: Path, log: Path) -> dict[str, Any]:
        self.arms.append(arm)
        stages = stage_layers(6, 1 if self.misplace else arm.pp, arm.partition)
        fingerprint = weights_fingerprint(Path(arm.model))
        what = tapped(arm.layers, stages, weights_fingerprint=fingerprint, tp_size=arm.tp)
        engine = Engine(out, what, run=arm.run_id)
        loaded = tokenize(prompts, read_prompt_file(prompts), lambda: None)
        for seed, prompt in enumerate(loaded):
            self._store(engine, prompt.sample_id, prompt.token_ids.tolist(), seed, arm)
        engine.close()
        self.prompts = [prompt.token_ids.tolist() for prompt in loaded]
        return {"samples": len(loaded)}

    def _store(self, engine: Engine, name: str, ids: list[int], seed: int, arm: Arm) -> None:
        ref, what = engine.ref(name), engine.tapped
        tokens = len(ids)
        stages = [stage for stage in range(what.pp_size) if owned(what, stage)]
        for stage in stages:
            made = job(what, ref, stage, tokens, seed)
            gather = made.gather

            def spoilt(start: int, end: int, out: torch.Tensor, gather: Any = gather) -> None:
                gather(start, end, out)
                out.view(torch.int16)[-1, -1, -1] ^= 1

            changes: dict[str, Any] = {}
            if stage == stages[0]:
                changes["token_ids"] = token_ids(0) if not ids else torch.tensor(ids).numpy()
            if name == self.flip_bit_of and arm.pp > 1 and stage == stages[-1]:
                changes["gather"] = spoilt
            engine.publisher.submit(job(what, ref, stage, tokens, seed, **changes))
        fragments = [r.fragment for r in drain(engine.publisher, len(stages)) if r.fragment]
        whole = manifest(what, ref, fragments, tokens, seed)
        engine.committer.commit(msgspec.structs.replace(whole, token_digest=token_digest(ids)))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    fake = Captures()
    monkeypatch.setattr(prove_module, "run_arm", fake)
    return fake


@pytest.fixture
def equivalence(stagetap: Command, checkpoint: Path) -> Command:
    def run(*arguments: object, layers: str = LAYERS) -> Outcome:
        return stagetap("equivalence", "--model", checkpoint, "--layers", layers, *arguments)

    return run


def test_bitwise_equal(equivalence: Command, captures: Captures) -> None:
    done = equivalence("--lengths", "1,7,33", "--json")
    assert done.code == 0, done.stderr
    expected = {
        "bitwise": True,
        "equal": True,
        "tensors": 15,
        "samples": 3,
        "max_abs": 0.0,
        "pp": 2,
        "layer_ids": [2, 0, 4, 6],
        "stages": {"0": [0, 2], "1": [4, 6]},
        "findings": [],
        "tolerance": "bitwise",
    }
    assert {key: done.json[key] for key in expected} == expected
    assert [arm.pp for arm in captures.arms] == [1, 2]
    assert [len(prompt) for prompt in captures.prompts] == [1, 7, 33]


def test_the_verdict_is_a_line(equivalence: Command, captures: Captures) -> None:
    done = equivalence("--lengths", "3")
    assert done.stdout.splitlines()[-1] == "bitwise equal to one stage"


def test_one_bit_gives_exit_code_1(equivalence: Command, captures: Captures) -> None:
    captures.flip_bit_of = "length-7"
    done = equivalence("--lengths", "1,7", "--json")
    assert done.code == 1
    assert done.json["bitwise"] is False
    assert done.json["differing"] == 1
    assert done.json["findings"][0].startswith("sample 'length-7', layer 6: 1 of 112 elements")
    tables = equivalence("--lengths", "1,7")
    assert tables.code == 1
    assert "sample 'length-7', layer 6" in tables.stderr
    assert tables.stdout.splitlines()[-1] == "not equal to one stage"


def test_tolerant_is_a_choice(equivalence: Command, captures: Captures) -> None:
    captures.flip_bit_of = "length-7"
    done = equivalence("--lengths", "1,7", "--tolerant", "--json")
    assert done.code == 0
    assert (done.json["bitwise"], done.json["equal"]) == (False, True)
    assert "2 ULP" in done.json["tolerance"]
    verdict = equivalence("--lengths", "1,7", "--tolerant").stdout.splitlines()[-1]
    assert verdict.startswith("equal to one stage within the tolerance")


def test_equal_but_on_one_stage_is_no_proof(equivalence: Command, captures: Captures) -> None:
    captures.misplace = True
    done = equivalence("--lengths", "5", "--json")
    assert done.code == 1
    (finding,) = done.json["findings"]
    assert "stages stored layers {0: [0, 2, 4, 6]}, expected were" in finding


@pytest.mark.parametrize(
    ("arguments", "layers", "said"),
    [
        (["--pp", 1], LAYERS, "--pp 1 compares one stage with itself"),
        (["--pp", 2], "0,2,3", "all taps [0, 2, 3] fall on stage 0 at --pp 2"),
        (["--pp", 3], "6,5", "fall on stage 2 at --pp 3"),
        (["--partition", "6,0"], LAYERS, "leaves stage 1 without a decoder layer"),
        (["--partition", "3,2"], LAYERS, "add up to the 6 layers"),
        (["--partition", "x"], LAYERS, "write the number of layers of each stage"),
        (["--partition", ""], LAYERS, "partition '': write the number of layers"),
        (["--lengths", ""], LAYERS, "lengths '': write numbers of tokens"),
        (["--lengths", "64"], LAYERS, "exceed the longest sequence of 64"),
        (
            ["--lengths", "9", "--engine-arg", "max_model_len=9"],
            LAYERS,
            "exceed the longest sequence of 9",
        ),
        (["--engine-arg", "pipeline_parallel_size=3"], LAYERS, "say --pp alone"),
        (
            ["--max-num-batched-tokens", 64, "--engine-arg", "max_num_batched_tokens=65"],
            LAYERS,
            "say --max-num-batched-tokens alone",
        ),
        (["--lengths", "0"], LAYERS, "0 is no length of a prompt"),
        (["--lengths", "a"], LAYERS, "write numbers of tokens"),
        (["--lengths", "1", "--prompts", "p"], LAYERS, "--prompts and --lengths exclude"),
        (["--prompts", "nowhere"], LAYERS, "No such file"),
        ([], "9", "9 is above 6"),
    ],
)
def test_what_would_prove_nothing_is_refused(
    equivalence: Command, captures: Captures, arguments: list[Any], layers: str, said: str
) -> None:
    done = equivalence(*arguments, "--json", layers=layers)
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr
    assert captures.arms == []


def test_arguments_reach_the_arms(equivalence: Command, captures: Captures) -> None:
    done = equivalence(
        *("--lengths", "5", "--pp", 3, "--tp", 2, "--partition", "1,4,1", "--json"),
        *("--max-num-batched-tokens", 64, "--engine-arg", "block_size=32"),
    )
    assert done.code == 0, done.stderr
    one, three = captures.arms
    assert one.engine_args == three.engine_args
    assert one.engine_args == {"block_size": 32, "max_num_batched_tokens": 64}
    assert (one.pp, one.tp, one.partition) == (1, 2, None)
    assert (three.pp, three.tp, three.partition) == (3, 2, [1, 4, 1])


def test_a_prompt_file(equivalence: Command, captures: Captures, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt_token_ids": [3, 1, 4], "id": "pi", "metadata": {"x": 1}}\n')
    assert equivalence("--prompts", file, "--json").json["samples"] == 1
    assert captures.prompts == [[3, 1, 4]]


def test_a_reference_is_reused(equivalence: Command, captures: Captures, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = equivalence("--lengths", "1,7", "--keep", kept, "--json")
    assert first.json["candidate"] == str(kept / "pp2")
    again = equivalence("--lengths", "1,7", "--reference", kept / "pp1", "--pp", 3, "--json")
    assert again.code == 0, again.stderr
    assert [arm.pp for arm in captures.arms] == [1, 2, 3]
    missing = equivalence("--lengths", "1,8", "--reference", kept / "pp1", "--json")
    assert missing.code == 1
    assert "length-8" in missing.json["findings"][0]


def test_a_reference_of_another_kind_is_refused(
    equivalence: Command, captures: Captures, tmp_path: Path, checkpoint: Path
) -> None:
    kept = tmp_path / "kept"
    assert equivalence("--lengths", "7", "--keep", kept).code == 0
    done = equivalence("--lengths", "7", "--reference", kept / "pp2")
    assert done.code == 2
    assert "has pp_size 2, this comparison 1" in done.stderr
    done = equivalence("--lengths", "7", "--reference", kept / "pp1", layers="0,4")
    assert "has layer_ids (2, 0, 4, 6), this comparison (0, 4)" in done.stderr
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 7}))
    done = equivalence("--lengths", "7", "--reference", kept / "pp1")
    assert (done.code, "has weights_fingerprint" in done.stderr) == (2, True)
    assert [arm.pp for arm in captures.arms] == [1, 2]


# An arm's process ---------------------------------------------------------------------------


def test_made_up_prompts_are_the_same_everywhere() -> None:
    some = {p.sample_id: p.token_ids.tolist() for p in prompts_of_lengths([1, 7], 500)}
    more = {p.sample_id: p.token_ids.tolist() for p in prompts_of_lengths([33, 7, 7], 500)}
    assert more["length-7"] == some["length-7"]
    assert set(more) == {"length-33", "length-7", "length-7-2"}
    assert all(0 <= token < 500 for ids in more.values() for token in ids)
    assert some["length-1"] == [prompts_of_lengths([1], 500)[0].token_ids[0]]


def test_prompts_survive_the_way_to_an_arm(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    made = prompts_of_lengths([1, 33], 49152)
    write_prompts(file, made)
    read = tokenize(file, read_prompt_file(file), lambda: None)
    assert [p.sample_id for p in read] == [p.sample_id for p in made]
    assert [p.token_ids.tolist() for p in read] == [p.token_ids.tolist() for p in made]


def test_an_arm_sets_its_partition_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    assert "VLLM_PP_LAYER_PARTITION" not in Arm("m", [1], pp=1).environment()
    # Threads change how attention on CPU sums: the single stage takes as many as one of several.
    single = Arm("m", [1], pp=2, partition=[10, 20]).single_stage()
    assert single.environment()["VLLM_CPU_OMP_THREADS_BIND"] == cores_by_rank(2).split("|")[0]
    assert "VLLM_PP_LAYER_PARTITION" not in single.environment()
    arm = Arm("m", [1], pp=2, partition=[10, 20])
    assert arm.environment()["VLLM_PP_LAYER_PARTITION"] == "10,20"


@pytest.mark.parametrize(
    ("code", "log", "stdout", "kind", "said"),
    [
        (2, "x\nstagetap: refused: no room\n", "", Refused, "the arm with 2 stages: no room"),
        (1, "stagetap: error: died\n", "", StageTapError, "the arm with 2 stages: died"),
        (
            1,
            "",
            '{"failures": [{"sample_id": "a", "error": "disk full"}]}',
            StageTapError,
            "sample 'a' failed: disk full",
        ),
        (139, "Segmentation fault\n", "", StageTapError, "ended with exit code 139"),
    ],
)
def test_how_an_arm_failed_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    code: int,
    log: str,
    stdout: str,
    kind: type[Exception],
    said: str,
) -> None:
    script = (
        f"import sys; sys.stderr.write({log!r}); sys.stdout.write({stdout!r}); sys.exit({code})"
    )
    monkeypatch.setattr(Arm, "command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(StageTapError, match=said) as raised:
        run_arm(Arm("m", [1], pp=2), tmp_path / "p", tmp_path / "out", tmp_path / "log")
    assert type(raised.value) is kind
    assert ("Segmentation fault" in capsys.readouterr().err) is (code == 139)


STUBBORN = """
import pathlib, signal, subprocess, sys, time
from stagetap.cli.interrupt import Interruption
with Interruption():
    grandchild = subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path(sys.argv[1]).write_text(str(grandchild.pid))
    time.sleep(600)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_no_process(sent: signal.Signals, tmp_path: Path) -> None:
    """The arm's own child, in a session of its own as an engine may be, ends too."""
    told = tmp_path / "pid"
    code = (
        "import sys\nfrom pathlib import Path\nfrom stagetap.equivalence.arms import Arm, run_arm\n"
        "from stagetap.cli import main\n"
        f"Arm.command = lambda *_: [sys.executable, '-c', {STUBBORN!r}, {str(told)!r}]\n"
        f"here = Path({str(tmp_path)!r})\n"
        "run_arm(Arm('m', [1], pp=2), here, here, here / 'log')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not told.exists() or not told.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        grandchild = psutil.Process(int(told.read_text()))
        (arm,) = psutil.Process(process.pid).children()
        # As a terminal or a supervisor would: the comparison for SIGINT, its arm for SIGTERM.
        (process if sent == signal.SIGINT else arm).send_signal(sent)
        _, alive = psutil.wait_procs([arm, grandchild], timeout=30)
        assert not alive
    finally:
        process.kill()
        process.wait()
