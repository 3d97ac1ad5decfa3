"""The consumer of compose.yaml: says of each sample what it got; a trainer stands in its place."""

import json
import signal
import sys

import stagetap

# As the first process of a container it would else not be told to stop.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

with stagetap.consume(sys.argv[1], stream="residual", verify=True, timeout_s=3600) as stream:
    for sample in stream:
        line = {
            "sample": sample.manifest.sample_id,
            "tokens": sample.manifest.token_count,
            "layers": list(sample.layer_ids),
            "hidden_states": list(sample.hidden_states.shape),
            "stages": [fragment.stage for fragment in sample.manifest.fragments],
        }
        print(json.dumps(line), flush=True)
