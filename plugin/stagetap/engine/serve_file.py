"""A file for ``vllm serve --config``, read by vLLM's own parser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stagetap.engine.configure import ASYNC_SCHEDULER, SCHEDULER, WORKERS
from stagetap.errors import Refused, StageTapError
from stagetap.incompatible import (
    KV_OFFLOADING,
    LORA,
    MICROBATCHES,
    NO_GENERATION,
    OTHER_SCHEDULER,
    OTHER_WORKER,
    SLEEP_MODE,
    SPECULATION,
    WEIGHT_TRANSFER,
    Feature,
)

if TYPE_CHECKING:
    from vllm import AsyncEngineArgs


def read_serve_file(file: Path) -> AsyncEngineArgs:
    """The engine arguments that ``vllm serve --config FILE`` would start from.

    StageTap's flags have become a ``kv_transfer_config``.

    Raises:
        Refused: vLLM's parser, or a rule of our flags, does not take what the file says.
    """
    from vllm import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from stagetap.engine.compat import serve_parser
    from stagetap.yaml_file import read_yaml_map

    class Parser(FlexibleArgumentParser):
        """Raises where vLLM's prints its usage and exits."""

        def error(self, message: str) -> NoReturn:
            raise Refused(message)

        def print_help(self, file: Any = None) -> NoReturn:
            raise Refused("it asks for help; remove that key")

    document = read_yaml_map(file)
    if "config" in document:
        raise Refused(
            f"{file}: vLLM reads no second file that config names; write what that says into this"
        )
    try:
        arguments = serve_parser(Parser()).parse_args(["serve", "--config", str(file)])
        return AsyncEngineArgs.from_cli_args(arguments)
    except (StageTapError, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise Refused(f"{file} is no configuration for vllm serve: {said}") from None


def asked_features(arguments: AsyncEngineArgs) -> dict[Feature, bool]:
    """What the engine would refuse on its finished configuration, as its arguments ask for it."""
    spelled_out = (arguments.spec_method, arguments.spec_model, arguments.spec_tokens)
    return {
        SPECULATION: any(each is not None for each in (arguments.speculative_config, *spelled_out)),
        SLEEP_MODE: arguments.enable_sleep_mode,
        WEIGHT_TRANSFER: arguments.weight_transfer_config is not None,
        LORA: arguments.enable_lora,
        MICROBATCHES: arguments.enable_dbo or arguments.ubatch_size > 1,
        KV_OFFLOADING: arguments.kv_offloading_size is not None,
        NO_GENERATION: arguments.runner not in ("auto", "generate")
        or arguments.convert not in ("auto", "none"),
        OTHER_SCHEDULER: arguments.scheduler_cls not in (None, SCHEDULER, ASYNC_SCHEDULER),
        OTHER_WORKER: arguments.worker_cls not in ("auto", *WORKERS, *WORKERS.values()),
    }
