"""What is told of a run in a real store before an engine starts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from checkpoints import tiny_checkpoint
from mooncake_run import Clients, Run
from stagetap.errors import Refused, StoreError
from stagetap.stores.base import KnownKind, check_store, check_stored
from stagetap.stores.mooncake_processes import Master


@pytest.fixture
def run(master: Master, clients: Clients) -> Iterator[Run]:
    """A run that has begun."""
    run = Run(master, clients, "global_segment_size=0&local_buffer_size=2MiB")
    yield run
    run.engine.close()


def test_a_run_that_holds_other_data(run: Run) -> None:
    what = run.engine.tapped
    held = KnownKind(
        layer_ids=what.layer_ids, weights_fingerprint=what.weights_fingerprint, dtype=what.dtype
    )
    check_stored(run.uri, held)
    other = msgspec.structs.replace(held, weights_fingerprint="of another model")
    with pytest.raises(Refused, match=rf"run '{run.name}' holds data with weights_fingerprint"):
        check_stored(run.uri, other)
    check_stored(run.uri.replace(run.name, "not-begun"), other)


def test_a_master_that_is_gone_is_named_by_that_process(own_master: Master) -> None:
    uri = f"mooncake://{own_master.address}/r?connect_timeout=1s"
    own_master.end()
    with pytest.raises(StoreError, match=own_master.address):
        check_stored(uri, KnownKind(layer_ids=(1,)))


def test_what_the_machine_has_not(run: Run) -> None:
    known = KnownKind(layer_ids=(1,))
    with pytest.raises(Refused, match="no RDMA device"):
        check_store(f"{run.uri}&protocol=rdma", known)
    with pytest.raises(Refused, match=r"global_segment_size: .* give less"):
        check_store(run.uri.replace("size=0", "size=400TiB", 1), known)


def test_capture_and_serve_refuse_in_one_line(run: Run, tmp_path: Path) -> None:
    model = tiny_checkpoint("llama", tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [1, 2, 3]}))
    for command in (
        ["capture", "--model", str(model), "--prompts", str(prompts), "--out", run.uri],
        ["serve", str(model), "--store", run.uri],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "stagetap", *command, "--layers", "1,2"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        assert "holds data with layer_ids" in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr
        assert "starting vLLM" not in done.stderr
