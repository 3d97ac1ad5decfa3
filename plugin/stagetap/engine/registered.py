"""What a vLLM that has loaded its plugins knows of StageTap, and of the models that are named.

``stagetap doctor`` runs this module as a child, in the environment of an engine: loading vLLM
takes a while, may fail in native code, and reads variables that a running process has settled.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import import_module

from stagetap.engine.configure import ASYNC_SCHEDULER, SCHEDULER, WORKERS
from stagetap.engine.environment import is_cpu_build
from stagetap.engine.vllm_errors import said_by_vllm
from stagetap.findings import Finding
from stagetap.options import CONNECTOR_NAME
from stagetap.wording import shortened

FLAGS = ("--stagetap-layers", "--stagetap-store", "--stagetap-options")
RUNS = "model in vllm"


def main() -> None:
    """Print the findings as one line of JSON, the last one of stdout."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    findings = [*_connector(), *_stand_ins(), *_flags(), *_runs(sys.argv[1:])]
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


def _runs(models: Sequence[str]) -> Iterator[Finding]:
    """Whether vLLM has a class for the architecture of each model, one that generates text."""
    from vllm import EngineArgs

    for model in models:
        try:
            found = EngineArgs(model=model, skip_tokenizer_init=True).create_model_config()
            generates = found.registry.is_text_generation_model(found.architectures, found)
        except (OSError, TypeError, ValueError) as error:
            yield Finding(RUNS, said_by_vllm(error), "give a model that this vLLM runs")
            continue
        name = shortened(found.architecture)
        yield Finding(
            RUNS,
            f"{name} generates text" if generates else f"{name} is an encoder or embedding model",
            None if generates else "capture takes decoder-only models: give one",
        )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
