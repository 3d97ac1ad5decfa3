"""What differs between the pinned releases of vLLM; nothing else in the plugin asks which it is.

A difference is told by what can be imported, never by a version number. `python -m surface` (in
tests/) checks every name, override and attribute that the plugin uses against each pin's sources.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:  # the one that vLLM's own cache-only layer asks, in each release
    from vllm.utils.torch_utils import is_quantized_kv_cache  # 0.32.0
except ImportError:
    from vllm.v1.kv_cache_interface import is_quantized_kv_cache  # 0.33.0

try:  # planning how caches share memory has become a module of its own
    from vllm.v1.core.kv_cache_utils import (  # 0.32.0
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )
except ImportError:
    from vllm.v1.core.kv_cache_planning import (  # 0.33.0
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
    )

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = [
    "get_kv_cache_config_from_groups",
    "get_kv_cache_groups",
    "is_quantized_kv_cache",
    "serve_parser",
]


def serve_parser(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
    """Give a parser the flags of ``vllm serve``; loads vLLM's server."""
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # 0.32.0
    except ImportError:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # 0.33.0
    return make_arg_parser(parser)
