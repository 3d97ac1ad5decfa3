"""``stagetap demo-online``: from an engine on two stages to a trainer, through memory alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from stagetap.cli.demo import LAYERS, PROMPTS, write_demo_prompts
from stagetap.cli.folders import temporary_folder
from stagetap.cli.output import activity, human_bytes, results, table
from stagetap.errors import StageTapError
from stagetap.models import resolve_model

RUN_ID = "demo"
_LENT = "512MiB"
_CONSUMER_SECONDS = 120.0
_END_SECONDS = 20.0


def demo_online_command() -> None:
    """Capture SmolLM2 on two pipeline stages into Mooncake, while another process consumes it.

    Ends with exit code 1 unless every sample was consumed, is bitwise what a capture of the same
    prompts to a directory holds, and has left nothing in the store.
    """
    from msgspec.structs import replace

    from stagetap.equivalence.arms import Arm, run_arm
    from stagetap.stores.mooncake_layout import is_of_samples
    from stagetap.stores.mooncake_uri import format_uri, parse_uri
    from stagetap.stores.mooncake_verify import listing

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arm = Arm(model=resolve_model("smollm2"), layers=LAYERS, pp=2, run_id=RUN_ID)
    with (
        temporary_folder("stagetap-demo-") as folder,
        activity() as notify,
        _store(folder / "store.log") as store,
    ):
        prompts, reference = write_demo_prompts(folder), folder / "reference"
        notify("capturing to a directory, two stages: what is right")
        run_arm(arm, prompts, reference, folder / "reference.log")
        uri = format_uri(replace(parse_uri(store["uri"]), run=RUN_ID))
        notify(f"capturing to {uri}, two stages, and consuming it in another process")
        log = folder / "consumer.log"
        with _consumer(uri, reference, log) as consumer:
            produced = run_arm(arm, prompts, uri, folder / "online.log")
            found = _found(consumer, log)
        left = [key for key in listing(store["metrics"])() if is_of_samples(RUN_ID, key)]
    committed = sum(key.endswith("/commit") for key in left)
    rows = table("samples", "")
    rows.add_row("produced", f"{produced['samples']} ({human_bytes(produced['bytes'])})")
    rows.add_row("consumed", str(found["consumed"]))
    rows.add_row("deleted", str(found["consumed"] - committed))
    results().print(uri, rows, sep="\n")
    for finding in found["findings"]:
        results().print(finding, soft_wrap=True)
    bitwise = found["equal"] == len(PROMPTS)
    results().print(f"keys left: {len(left)}")
    results().print(f"bitwise: {'yes' if bitwise else 'no'}")
    if left or not bitwise or not produced["samples"] == found["consumed"] == len(PROMPTS):
        raise typer.Exit(1)


@contextmanager
def _store(log: Path) -> Iterator[dict[str, Any]]:
    """A store of its own: what ``stagetap store up --json`` says of it. Raises StageTapError."""
    stagetap = [sys.executable, "-m", "stagetap"]
    command = [*stagetap, "store", "up", "--port", "0", "--lend", _LENT, "--json"]
    with _running(command, log) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        if not line:
            raise StageTapError(f"the store did not start: {_last_words(log)}")
        yield json.loads(line)


@contextmanager
def _consumer(uri: str, reference: Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    module = "stagetap.cli.demo_consumer"
    command = [sys.executable, "-m", module, uri, str(reference), str(len(PROMPTS))]
    with _running(command, log) as child:
        yield child


def _found(consumer: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """What the consumer says when it is done. Raises StageTapError."""
    try:
        said, _ = consumer.communicate(timeout=_CONSUMER_SECONDS)
    except subprocess.TimeoutExpired:
        raise StageTapError(
            f"the consumer has not ended {_CONSUMER_SECONDS:g} s after the capture: "
            f"{_last_words(log)}"
        ) from None
    if consumer.returncode:
        raise StageTapError(
            f"the consumer ended with exit code {consumer.returncode}: {_last_words(log)}"
        )
    return dict(json.loads(said))


@contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A child that is ended with the body, however that ends. ``log``: where its stderr goes."""
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _last_words(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
