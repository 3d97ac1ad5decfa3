"""What a vLLM that has loaded its plugins knows of StageTap.

``stagetap doctor`` runs this module as a child, in the environment of an engine: loading vLLM
takes a while, may fail in native code, and reads variables that a running process has settled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module

from stagetap.engine.configure import ASYNC_SCHEDULER, SCHEDULER, WORKERS
from stagetap.engine.environment import is_cpu_build
from stagetap.findings import Finding
from stagetap.options import CONNECTOR_NAME

FLAGS = ("--stagetap-layers", "--stagetap-store", "--stagetap-options")


def main() -> None:
    """Print the findings as one line of JSON, the last one of stdout."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    findings = [*_connector(), *_stand_ins(), *_flags()]
    print(json.dumps([asdict(each) for each in findings]))


def _connector() -> Iterator[Finding]:
    """Ours, and one that vLLM lets have cache groups of its own: taps are one beside the KV cache.

    A connector runs on every pipeline stage, so no model has to support extraction there.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    found = KVConnectorFactory.get_connector_class_by_name(CONNECTOR_NAME)
    yield Finding(
        "connector",
        f"{CONNECTOR_NAME} is {found.__module__}.{found.__qualname__}",
        None if supports_hma(found) else "this vLLM is not patched: run `stagetap patch apply`",
    )


def _stand_ins() -> Iterator[Finding]:
    """The classes that are put in the place of vLLM's worker and schedulers load with it."""
    kind = "cpu_worker" if is_cpu_build() else "gpu_worker"
    worker = next(ours for theirs, ours in WORKERS.items() if kind in theirs)
    loaded = []
    for name in (worker, SCHEDULER, ASYNC_SCHEDULER):
        module, _, cls = name.rpartition(".")
        loaded.append(getattr(import_module(module), cls).__name__)
    yield Finding("pipeline stages", f"{', '.join(loaded)} load on every stage")


def _flags() -> Iterator[Finding]:
    """The flags of ``vllm serve``; its parser needs a device, our part of it does not."""
    from vllm.platforms import current_platform
    from vllm.plugins.hooks import run_hooks
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    if current_platform.is_unspecified():
        run_hooks("cli_args", parser)
        where = "registered; no device is here, so vLLM's own were not made"
    else:
        from stagetap.engine.compat import serve_parser

        parser = serve_parser(parser)
        where = "in the help of vllm serve"
    said = parser.format_help()
    missing = [flag for flag in FLAGS if flag not in said]
    yield Finding(
        "flags",
        f"{', '.join(FLAGS)}: {where}" if not missing else f"vllm serve lacks {missing[0]}",
        "this vLLM is not patched, or VLLM_PLUGINS leaves stagetap out" if missing else None,
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
