"""An engine's side of a store whose link is cut: ``python -m stores.mooncake.late_writer URI``.

It fills memory, gives it back, and says "ready". Told to go on it writes there again, over a link
that is cut by now, until Mooncake gives up. Told that the link is up it exports samples as a new
engine, until what it was writing arrives in them, and says what became of each.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from functools import partial

import numpy as np
import torch

import stagetap
from stagetap.errors import StageTapError, StoreError
from stagetap.stores.base import open_store_committer, open_store_writer
from stagetap.stores.mooncake_client import MooncakeClient, open_client
from stagetap.stores.mooncake_layout import sample_commit_key, writer_key
from stagetap.stores.mooncake_objects import Placed
from stagetap.stores.mooncake_records import is_intact
from stagetap.stores.mooncake_uri import parse_uri
from store_samples import Engine, states

TOKENS = 9
HELD_UP = 4
ARRIVES_WITHIN = 60


def main(uri: str) -> None:
    client = open_client(parse_uri(uri), "committer")
    memory = np.full(8 * 1024**2, 7, np.uint8)
    client.register(memory.ctypes.data, memory.nbytes, memory)

    def put(name: str) -> None:
        client.put_from([Placed(name, ((memory.ctypes.data, memory.nbytes),))])

    before = [f"before-{n}" for n in range(HELD_UP)]
    for name in before:
        put(name)
    client.remove(before, force=True)
    say("ready")

    assert sys.stdin.readline()
    failed: list[str] = []
    threads = [threading.Thread(target=partial(_fails, put, failed, n)) for n in range(HELD_UP)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sys.stdin.readline()
    engine = _engine(uri)
    exported = _export_until_something_changes(engine, client)
    time.sleep(3)
    engine.export("after", TOKENS, seed=len(exported))
    say(failed=failed, exported=len(exported), found=_outcomes(uri, [*exported, "after"]))


def _fails(put: object, failed: list[str], number: int) -> None:
    try:
        put(f"held-up-{number}")  # type: ignore[operator]
    except StoreError as error:
        failed.append(type(error).__name__)


def _engine(uri: str) -> Engine:
    """Once the store has memory again."""
    while True:
        with suppress(StoreError):
            return Engine(
                (open_store_committer(uri), open_store_writer(uri)), run=parse_uri(uri).run
            )
        time.sleep(0.5)


def _export_until_something_changes(engine: Engine, client: MooncakeClient) -> list[str]:
    """The ids of what was committed."""
    exported: list[str] = []
    watched = [writer_key(engine.run, 0), sample_commit_key(engine.run, "s0")]
    deadline = time.monotonic() + ARRIVES_WITHIN
    while time.monotonic() < deadline:
        with suppress(StageTapError):  # what has changed may be met here first
            name = f"s{len(exported)}"
            engine.export(name, TOKENS, seed=len(exported))
            exported.append(name)
        with suppress(StoreError):
            found = [(key, client.get(key)) for key in watched]
            if not all(is_intact(key, data) for key, data in found if data is not None):
                break
        time.sleep(0.05)
    return exported


def _outcomes(uri: str, names: list[str]) -> dict[str, int]:
    """How often the trainer met what: samples that are right or wrong, and errors by name."""
    found: dict[str, int] = {}
    with stagetap.consume(uri, timeout_s=10) as stream:
        iter(stream)
        name = ""
        while name != "after":
            try:
                sample = next(stream)
                name = sample.sample_id
                outcome = "right" if _is_right(sample, names.index(name)) else "wrong"
            except StageTapError as error:
                outcome = type(error).__name__
            found[outcome] = found.get(outcome, 0) + 1
            if outcome == "SampleTimeout":
                break
    return found


def _is_right(sample: stagetap.Sample, seed: int) -> bool:
    return all(
        torch.equal(sample.layer(k), states(k, TOKENS, seed).bfloat16()) for k in (2, 0, 4, 6)
    )


def say(*words: str, **what: object) -> None:
    print(*words, *([json.dumps(what)] if what else []), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
