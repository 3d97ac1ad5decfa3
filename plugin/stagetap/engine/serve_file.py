"""A file for ``vllm serve --config``, read by vLLM's own parser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from stagetap.errors import Refused, StageTapError

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
