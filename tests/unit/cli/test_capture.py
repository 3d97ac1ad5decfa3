"""``stagetap capture``: what is refused before an engine, and what comes out of one."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stagetap.engine.session as session_module
from stagetap.engine.session import Captured, Prompt
from stagetap.errors import Refused, StageTapError
from stagetap.fingerprint import weights_fingerprint
from stagetap.manifest import token_digest
from store_samples import Engine, tapped
from unit.cli.commands import Command, Outcome


class StoreSession:
    """Stands for an engine: stores made-up states for every prompt, through the real store."""

    started: list[dict[str, Any]]
    bad: set[str]
    interrupt_after: int | None
    refuses: StageTapError | None
    closed: int

    def __init__(self, model: str, **arguments: Any) -> None:
        cls = type(self)
        if cls.refuses is not None:
            raise cls.refuses
        cls.started.append({"model": model, **arguments})
        print("vLLM says hello on stdout")
        os.write(1, b"a worker says hello on stdout\n")
        dummy = arguments["engine_args"].get("load_format") == "dummy"
        fingerprint = weights_fingerprint(Path(model), dummy_weights=dummy)
        what = tapped(layer_ids=arguments["layers"], weights_fingerprint=fingerprint)
        self._output_rows = max(0, arguments["include_output"] - 1)
        self._engine = Engine(Path(arguments["store"]), what, run=arguments["run_id"])

    def capture(self, prompts: Iterable[Prompt], in_flight: int = 16) -> Iterator[Captured]:
        for number, prompt in enumerate(prompts, start=1):
            assert prompt.sample_id is not None
            if prompt.sample_id in self.bad:
                yield Captured(prompt.sample_id, tokens=0, bytes=0, error="no [room] left")
                continue
            yield self._store(prompt.sample_id, prompt.token_ids)
            if number == self.interrupt_after:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)  # It arrives through another thread.

    def _store(self, sample_id: str, token_ids: list[int]) -> Captured:
        import msgspec

        ids = np.array([*token_ids, *[1] * self._output_rows], np.int64)
        made = self._engine.publish(self._engine.ref(sample_id), len(ids), ids=ids)
        made = msgspec.structs.replace(
            made, token_digest=token_digest(ids), prompt_token_count=len(token_ids)
        )
        self._engine.committer.commit(made)
        size = sum(fragment.byte_size for fragment in made.fragments)
        return Captured(sample_id, tokens=len(ids), bytes=size, error=None)

    def close(self) -> None:
        type(self).closed += 1
        self._engine.close()


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> type[StoreSession]:
    class Fresh(StoreSession):
        interrupt_after = None
        refuses = None
        closed = 0

    Fresh.started, Fresh.bad = [], set()
    monkeypatch.setattr(session_module, "CaptureSession", Fresh)
    return Fresh


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt_token_ids": list(range(n)), "id": f"s{n}"} for n in range(1, 6)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def capture(stagetap: Command, checkpoint: Path, prompt_file: Path, tmp_path: Path) -> Command:
    def run(*arguments: object, layers: str = "2,0,6") -> Outcome:
        return stagetap(
            *("capture", "--model", checkpoint, "--prompts", prompt_file),
            *("--out", tmp_path / "out", "--layers", layers, *arguments),
        )

    return run


def test_json_is_the_only_line_on_stdout(
    capture: Command, sessions: type[StoreSession], tmp_path: Path
) -> None:
    done = capture("--pp", 2, "--json")
    assert done.code == 0, done.stderr
    report = done.json
    expected = {
        "samples": 5,
        "tokens": 15,
        "bytes": 15 * 3 * 16 * 2,
        "failed": 0,
        "skipped": 0,
        "left": 0,
        "stopped": None,
        "layer_ids": [2, 0, 6],
        "pp": 2,
        "run": "capture",
    }
    assert {key: report[key] for key in expected} == expected
    assert "hello on stdout" in done.stderr
    assert sessions.closed == 1


def test_the_engine_gets_what_was_asked_for(
    capture: Command, sessions: type[StoreSession], checkpoint: Path, tmp_path: Path
) -> None:
    done = capture(
        *("--pp", 2, "--tp", 2, "--max-len", 32, "--include-output", 4, "--run", "mine"),
        *("--dtype", "float32", "--engine-arg", "block-size=32", "--engine-arg", "seed=x"),
    )
    assert done.code == 0, done.stderr
    (arguments,) = sessions.started
    engine_args = arguments.pop("engine_args")
    assert arguments == {
        "model": str(checkpoint),
        "layers": (2, 0, 6),
        "store": str(tmp_path / "out"),
        "pp": 2,
        "tp": 2,
        "max_len": 32,
        "run_id": "mine",
        "include_output": 4,
    }
    assert engine_args["block_size"] == 32
    assert engine_args["seed"] == "x"
    assert engine_args["dtype"] == "float32"
    assert "5 samples captured, 30 tokens" in done.stdout


def test_without_resume_a_run_that_exists_is_refused(
    capture: Command, sessions: type[StoreSession]
) -> None:
    assert capture().code == 0
    again = capture("--json")
    assert again.code == 2
    assert again.stdout == ""
    assert "holds 5 samples of run 'capture' already; add --resume" in again.stderr
    assert capture("--run", "other").code == 0
    assert len(sessions.started) == 2


def test_resume_does_only_what_is_missing(
    capture: Command, sessions: type[StoreSession], prompt_file: Path
) -> None:
    lines = prompt_file.read_text().splitlines(keepends=True)
    prompt_file.write_text("".join(lines[:3]))
    assert capture().code == 0
    prompt_file.write_text("".join(reversed(lines)))
    done = capture("--resume", "--json")
    assert done.code == 0
    assert (done.json["skipped"], done.json["samples"], done.json["tokens"]) == (3, 2, 9)
    nothing = capture("--resume", "--json")
    assert (nothing.code, nothing.json["skipped"], nothing.json["samples"]) == (0, 5, 0)
    assert len(sessions.started) == 2


def test_resume_of_an_empty_directory_captures_all(
    capture: Command, sessions: type[StoreSession]
) -> None:
    assert capture("--resume", "--json").json["samples"] == 5


def test_resume_with_another_prompt_under_one_id_is_refused(
    capture: Command, sessions: type[StoreSession], prompt_file: Path
) -> None:
    assert capture().code == 0
    prompt_file.write_text('{"prompt_token_ids": [9, 9, 9], "id": "s3"}\n')
    done = capture("--resume")
    assert done.code == 2
    assert "line 1: sample 's3' is committed with another prompt" in done.stderr


def test_resume_with_another_prompt_of_a_sample_with_output_is_refused(
    capture: Command, sessions: type[StoreSession], prompt_file: Path
) -> None:
    output = ("--include-output", 4)
    assert capture(*output).code == 0
    assert capture(*output, "--resume", "--json").json["skipped"] == 5
    prompt_file.write_text('{"prompt_token_ids": [9, 9, 9], "id": "s3"}\n')
    done = capture(*output, "--resume")
    assert done.code == 2
    assert "line 1: sample 's3' is committed with another prompt" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--include-output", 8), "captured with --include-output 0, not with --include-output 8"),
        (
            ("--dtype", "float32"),
            "dtype bfloat16, this engine would write float32: ask for the same",
        ),
        (("--engine-arg", "kv_cache_dtype=fp8"), "kv_cache_dtype=fp8; ask for the same"),
    ],
)
def test_resume_that_asks_for_something_else_is_refused(
    capture: Command,
    sessions: type[StoreSession],
    arguments: tuple[object, ...],
    says: str,
) -> None:
    assert capture().code == 0
    done = capture("--resume", *arguments)
    assert done.code == 2
    assert says in done.stderr
    assert capture("--resume", "--dtype", "auto", "--pp", 2, "--json").json["skipped"] == 5
    assert len(sessions.started) == 1


def test_resume_with_another_model_is_refused(
    capture: Command, sessions: type[StoreSession], checkpoint: Path
) -> None:
    assert capture().code == 0
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))
    for arguments in (("--resume",), ("--run", "other")):
        done = capture(*arguments)
        assert done.code == 2
        assert "holds data with weights_fingerprint" in done.stderr
    assert len(sessions.started) == 1


def test_a_run_that_no_capture_made_is_not_gone_on_with(
    capture: Command, sessions: type[StoreSession], tmp_path: Path
) -> None:
    assert capture("--run", "served/1").code == 0
    (note,) = (tmp_path / "out" / "jobs").iterdir()
    text = note.read_text()
    note.unlink()
    done = capture("--resume", "--run", "served/1")
    assert done.code == 2
    assert "run 'served/1'" in done.stderr
    assert "was not captured by `stagetap capture`" in done.stderr
    note.write_text(text[:20])
    assert "cannot be read" in capture("--resume", "--run", "served/1").stderr
    note.write_text(text)
    assert capture("--resume", "--run", "served/1").code == 0


def test_a_partition_that_no_engine_starts_with(
    capture: Command, sessions: type[StoreSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    for partition, says in (("1,4", "add up to the 6 layers"), ("6,0", "leaves stage 1 without")):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        done = capture("--pp", 2)
        assert (done.code, sessions.started) == (2, [])
        assert f"VLLM_PP_LAYER_PARTITION: partition {partition}" in done.stderr
        assert says in done.stderr
        assert "unset the variable" in done.stderr


def test_other_layers_in_one_store_are_refused(
    capture: Command, sessions: type[StoreSession]
) -> None:
    assert capture().code == 0
    done = capture("--run", "other", layers="2,4")
    assert done.code == 2
    assert "holds data with layer_ids [2, 0, 6], this engine would write [2, 4]" in done.stderr
    assert len(sessions.started) == 1


def test_failed_samples_give_exit_code_1_and_are_listed(
    capture: Command, sessions: type[StoreSession]
) -> None:
    sessions.bad = {"s2", "s4"}
    done = capture("--json")
    assert done.code == 1
    assert (done.json["samples"], done.json["failed"]) == (3, 2)
    assert done.json["failures"][0] == {"sample_id": "s2", "error": "no [room] left"}
    assert "failed: s2: no [room] left" in done.stderr


def test_an_interrupt_says_how_to_go_on(capture: Command, sessions: type[StoreSession]) -> None:
    sessions.interrupt_after = 2
    done = capture("--json")
    assert done.code == 130
    assert (done.json["samples"], done.json["left"], done.json["stopped"]) == (2, 3, "interrupt")
    assert "2 samples are committed, 3 prompts left; run the same command with" in done.stderr
    assert sessions.closed == 1
    sessions.interrupt_after = None
    assert capture("--resume", "--json").json["samples"] == 3


def test_a_disk_without_room_is_refused_before_the_engine(
    capture: Command, sessions: type[StoreSession]
) -> None:
    done = capture("--keep-free-mib", 2**40)
    assert done.code == 2
    assert "are to stay free; make room, or lower --keep-free-mib" in done.stderr
    assert sessions.started == []


def test_an_engine_that_refuses(capture: Command, sessions: type[StoreSession]) -> None:
    sessions.refuses = Refused("layers: 9 is above 6")
    done = capture("--json")
    assert (done.code, done.stdout) == (2, "")
    assert "stagetap: refused: layers: 9 is above 6\n" in done.stderr
    assert "Traceback" not in done.stderr
    sessions.refuses = StageTapError("vLLM did not start:\nno memory")
    done = capture()
    assert done.code == 1
    assert "stagetap: error: vLLM did not start: no memory\n" in done.stderr


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ("2,2", "2 is asked for more than once"),
        ("7", "7 is above 6"),
        ("-1", "-1 is negative"),
        ("a", "'a' is no choice of layers"),
        ("eagle3", "eagle3 would tap [2, 3, 3, 6] of 6 layers"),
        ("", "layers is empty"),
    ],
)
def test_layers_are_refused_before_the_engine(
    capture: Command, sessions: type[StoreSession], layers: str, said: str
) -> None:
    done = capture(layers=layers)
    assert done.code == 2
    assert said in done.stderr
    assert sessions.started == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"text": 1}', "line 2: text must be a string"),
        ('{"prompt_token_ids": [500]}', "line 2: token id 500 is outside the vocabulary of 500"),
        (
            json.dumps({"prompt_token_ids": [1] * 64}),
            "line 2: 64 tokens and the one that the engine makes",
        ),
    ],
)
def test_a_bad_line_is_refused_before_the_engine(
    capture: Command, sessions: type[StoreSession], prompt_file: Path, line: str, said: str
) -> None:
    prompt_file.write_text('{"prompt_token_ids": [1]}\n' + line + "\n")
    done = capture("--json")
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert sessions.started == []


def test_a_model_without_a_tokenizer(
    capture: Command, sessions: type[StoreSession], prompt_file: Path
) -> None:
    prompt_file.write_text('{"text": "hello"}\n')
    done = capture()
    assert done.code == 2
    assert "cannot be loaded" in done.stderr
    assert "write the prompts as prompt_token_ids" in done.stderr


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_a_tokenizer_that_is_made_up(
    capture: Command,
    sessions: type[StoreSession],
    checkpoint: Path,
    prompt_file: Path,
    model_type: str,
) -> None:
    """Of config.json alone transformers makes one that knows no word, or takes all for unknown."""
    config = checkpoint / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": model_type}))
    prompt_file.write_text('{"text": "hello"}\n')
    done = capture()
    assert (done.code, sessions.started) == (2, [])
    assert "has no tokenizer; fetch its tokenizer files" in done.stderr


def test_weights_are_looked_for_before_the_engine(
    capture: Command, sessions: type[StoreSession], checkpoint: Path
) -> None:
    (checkpoint / "model.safetensors").unlink()
    done = capture()
    assert (done.code, sessions.started) == (2, [])
    assert "has no .safetensors file" in done.stderr
    assert capture("--engine-arg", "load_format=dummy").code == 0


def test_a_model_that_is_not_there(stagetap: Command, prompt_file: Path) -> None:
    done = stagetap(
        "capture", "--model", "./nowhere", "--prompts", prompt_file, "--out", "o", "--layers", "1"
    )
    assert done.code == 2
    assert "model ./nowhere: no such folder" in done.stderr


def test_an_engine_argument_that_no_engine_takes(
    capture: Command, sessions: type[StoreSession]
) -> None:
    done = capture("--engine-arg", f"hf_overrides={'[' * 60_000}")
    assert (done.code, sessions.started) == (2, [])
    assert "--engine-arg hf_overrides is nested too deeply" in done.stderr
    assert capture("--engine-arg", f"seed={'9' * 5000}").code == 0  # text; vLLM refuses it


def test_an_engine_argument_that_is_none(capture: Command, sessions: type[StoreSession]) -> None:
    assert "write NAME=VALUE" in capture("--engine-arg", "x").stderr
    twice = capture("--engine-arg", "x=1", "--engine-arg", "x=2")
    assert (twice.code, sessions.started) == (2, [])
    assert "given twice" in twice.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--max-len", 32, "--engine-arg", "max_model_len=33"), "--max-len 32 and"),
        (("--max-len", 32, "--engine-arg", "max_model_len=null"), "max_model_len=None differ"),
        (("--dtype", "half", "--engine-arg", "dtype=bfloat16"), "say --dtype alone"),
        (("--engine-arg", "pipeline_parallel_size=2"), "--pp 1 and"),
        (("--tp", 2, "--engine-arg", "tensor_parallel_size=4"), "say --tp alone"),
        (("--engine-arg", "model=other"), "say --model alone"),
        (("--engine-arg", "max_model_len=5"), "line 5: 5 tokens and the one that the engine makes"),
        (("--engine-arg", "max_model_len=6", "--include-output", 3), "4 tokens and 3 of output"),
        (("--engine-arg", "dtype=double"), "dtype 'double' is none that vLLM knows"),
        (("--dtype", ""), "dtype '' is none that vLLM knows"),
    ],
)
def test_an_option_and_an_argument_of_one_meaning(
    capture: Command, sessions: type[StoreSession], options: tuple[object, ...], said: str
) -> None:
    done = capture(*options)
    assert (done.code, sessions.started) == (2, [])
    assert said in done.stderr


def test_an_argument_that_says_what_its_option_does(
    capture: Command, sessions: type[StoreSession]
) -> None:
    same = ("--max-len", 32, "--engine-arg", "max_model_len=32", "--dtype", "half")
    done = capture(*same, "--engine-arg", "dtype=half", "--engine-arg", "tensor_parallel_size=1")
    assert done.code == 0, done.stderr
    (arguments,) = sessions.started
    assert (arguments["max_len"], arguments["engine_args"]["dtype"]) == (32, "half")
    assert not {"max_model_len", "tensor_parallel_size"} & arguments["engine_args"].keys()
    done = capture("--engine-arg", "max_model_len=-1", "--run", "other")  # as much as fits
    assert done.code == 0, done.stderr
    assert sessions.started[1]["max_len"] is None
    assert sessions.started[1]["engine_args"]["max_model_len"] == -1


def test_stdout_is_given_back(capture: Command, sessions: type[StoreSession]) -> None:
    capture("--json")
    before = os.fstat(1)
    capture("--json")
    assert os.fstat(1).st_ino == before.st_ino
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.stdout.writable()


def test_a_mooncake_store_that_is_not_there_is_told_before_an_engine(
    capture: Command, sessions: type[StoreSession]
) -> None:
    done = capture("--out", "mooncake://127.0.0.1:1/run?global_segment_size=0")
    assert done.code == 1
    assert "127.0.0.1:1" in done.stderr
    assert sessions.started == []
