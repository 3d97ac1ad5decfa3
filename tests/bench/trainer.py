"""The trainer whose samples are timed: ``python -m bench.trainer URI COUNT``.

Says when it waits for samples, and then when it had each of them as tensors, as one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import stagetap


def main(uri: str, count: int) -> None:
    """Consume so many samples."""
    arrived: dict[str, float] = {}
    with stagetap.consume(uri, limit=count, stream="residual") as stream:
        iter(stream)
        print("waiting", flush=True)
        for sample in stream:
            assert sample.hidden_states.shape[0] == len(sample.input_ids)
            arrived[sample.sample_id] = time.monotonic()
    print(json.dumps(arrived), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
