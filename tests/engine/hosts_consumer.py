"""A trainer on a host of its own, which goes on over failures.

``python -m engine.hosts_consumer URI REFERENCE SECONDS`` consumes until nothing was committed for
so long, and says each thing that happens as one line of JSON.
"""

from __future__ import annotations

import json
import sys

import stagetap
from engine.mooncake_consumer import same
from stagetap.errors import SampleTimeout, StageTapError


def main(uri: str, reference: str, seconds: float) -> None:
    expected = stagetap.open_dataset(reference, verify=True)
    with stagetap.consume(uri, verify=True, stream="residual", timeout_s=seconds) as stream:
        iter(stream)
        say(ready=True)
        while True:
            try:
                sample = next(stream)
            except SampleTimeout as timeout:
                say(end=str(timeout))
                return
            except StageTapError as error:
                say(error=f"{type(error).__name__}: {error}")
            else:
                equal = same(sample, expected[sample.sample_id])
                stream.finish()  # its id is free again
                say(sample=sample.sample_id, equal=equal)


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
