"""A trainer: shares no file with the engine but the reference that it compares with.

``python -m engine.mooncake_consumer URI REFERENCE COUNT`` consumes so many samples and prints what
it found as one line of JSON.
"""

from __future__ import annotations

import json
import sys

import torch

import stagetap


def main(uri: str, reference: str, count: int) -> None:
    expected = stagetap.open_dataset(reference, verify=True)
    equal, different = [], []
    parts = {}
    with stagetap.consume(uri, limit=count, verify=True, stream="residual") as stream:
        for sample in stream:
            parts[sample.sample_id] = max(len(each.parts) for each in sample.manifest.fragments)
            (equal if same(sample, expected[sample.sample_id]) else different).append(
                sample.sample_id
            )
    print(json.dumps({"equal": equal, "different": different, "parts": parts}))


def same(sample: stagetap.Sample, other: stagetap.Sample) -> bool:
    """Whether two samples are equal, bit for bit."""
    return (
        sample.layer_ids == other.layer_ids
        and sample.metadata == other.metadata
        and torch.equal(sample.input_ids, other.input_ids)
        and all(
            torch.equal(sample.layer(k).view(torch.int16), other.layer(k).view(torch.int16))
            for k in other.manifest.tapped.layer_ids
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
