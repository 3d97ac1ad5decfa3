"""The trainer of ``stagetap demo-online``: a process that shares nothing with the engine but a run.

``python -m stagetap.cli.demo_consumer URI REFERENCE COUNT`` consumes so many samples as they are
committed, compares each with a directory of the same prompts, and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import stagetap
from stagetap.equivalence.compare import compare_samples
from stagetap.errors import ForeignStore
from stagetap.reader.online import OnlineStream

START_SECONDS = 300.0
"""How long an engine may take until its run begins, and then until its first sample."""

_LOOK_SECONDS = 3.0  # each look opens a connection


def main(uri: str, reference: str, count: int) -> None:
    """Consume, compare, and say what was found."""
    expected = stagetap.open_dataset(reference, verify=True)
    equal = 0
    findings: list[str] = []
    with _stream_of_a_run_to_come(uri, count) as stream:
        for sample in stream:
            comparison = compare_samples(expected[sample.sample_id], sample)
            equal += comparison.bitwise
            findings += comparison.findings()
        stream.settle(START_SECONDS)
        consumed = stream.consumed
    print(json.dumps({"consumed": consumed, "equal": equal, "findings": findings}))


def _stream_of_a_run_to_come(uri: str, count: int) -> OnlineStream:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return stagetap.consume(
                uri, limit=count, verify=True, stream="residual", timeout_s=START_SECONDS
            )
        except ForeignStore:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
